from datetime import date

import pytest
from ledgerline import Entry, ParseError, parse_ledger
from ledgerline.entries import parse_entry


def test_an_entry():
    entry = parse_entry("2024-03-01  -42.50  weekly groceries  #food #home")
    assert entry == Entry(date(2024, 3, 1), -4250, "weekly groceries", ("food", "home"))


def test_tags_anywhere_lower_case_and_once():
    entry = parse_entry("2024-03-01 5 #Food dinner #FOOD out")
    assert entry.tags == ("food",)
    assert entry.what == "dinner out"


def test_a_lone_hash_is_no_tag():
    assert parse_entry("2024-03-01 5 seat # 7").what == "seat # 7"


def test_an_entry_may_have_no_text():
    assert parse_entry("2024-03-01 5") == Entry(date(2024, 3, 1), 500, "")


def test_month():
    assert parse_entry("2024-03-31 5").month == "2024-03"


def test_empty_lines_and_remarks_are_skipped():
    text = "; March\n\n2024-03-01 1 a\n   ; more\n2024-03-02 2 b\n"
    assert [entry.what for entry in parse_ledger(text)] == ["a", "b"]


def test_entries_are_ordered_by_day():
    text = "2024-03-05 1 late\n2024-03-01 2 first\n2024-03-05 3 later\n"
    assert [entry.what for entry in parse_ledger(text)] == ["first", "late", "later"]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("2024-03-01", 1, "a date and an amount"),
        ("\n2024-13-01 5 x", 2, "not a date"),
        ("; x\n\n2024-03-01 five", 3, "not an amount"),
    ],
)
def test_errors_name_the_line(text, line, message):
    with pytest.raises(ParseError, match=message) as raised:
        parse_ledger(text)
    assert raised.value.line == line
    assert str(raised.value).startswith(f"line {line}: ")
