import pytest
from ledgerline import balances, by_tag, monthly, parse_ledger, render_table

LEDGER = """\
2023-11-30  1,500.00  wages
2023-12-02   -640.00  rent        #home
2024-02-03    -42.50  groceries   #food #home
2024-02-10     -8.00  coffee      #food
2024-02-11     (0.50) sweets
"""


@pytest.fixture
def entries():
    return parse_ledger(LEDGER)


def test_balances(entries):
    assert balances(entries) == [150000, 86000, 81750, 80950, 80900]


def test_balances_from_an_opening(entries):
    assert balances(entries[:2], opening=-100000) == [50000, -14000]


def test_no_entries():
    assert balances([]) == []
    assert by_tag([]) == {}
    assert monthly([]) == []
    assert render_table([]) == ""


def test_sums_by_tag(entries):
    assert list(by_tag(entries).items()) == [("home", -68250), ("food", -5050), ("other", 149950)]


def test_the_untagged_have_a_name(entries):
    assert by_tag(entries, untagged="-")["-"] == 149950


def test_monthly_fills_the_gaps(entries):
    assert monthly(entries) == [
        ("2023-11", 150000, 0),
        ("2023-12", 0, 64000),
        ("2024-01", 0, 0),
        ("2024-02", 0, 5100),
    ]


def test_monthly_over_a_new_year():
    entries = parse_ledger("2023-12-31 1\n2024-01-01 2\n")
    assert monthly(entries) == [("2023-12", 100, 0), ("2024-01", 200, 0)]


def test_table(entries):
    assert render_table(entries[:3], opening=5) == "\n".join(
        [
            "2023-11-30  +1,500.00  1,500.05  wages",
            "2023-12-02    -640.00    860.05  rent",
            "2024-02-03     -42.50    817.55  groceries",
        ]
    )


def test_table_has_no_trailing_blanks():
    entries = parse_ledger("2024-02-03 5\n")
    assert render_table(entries) == "2024-02-03  +5.00  5.00"
