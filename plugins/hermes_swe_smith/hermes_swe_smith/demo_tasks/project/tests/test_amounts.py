import pytest
from ledgerline import format_amount, parse_amount


@pytest.mark.parametrize(
    ("text", "cents"),
    [
        ("0", 0),
        ("12", 1200),
        ("12.5", 1250),
        ("12.05", 1205),
        ("-3.10", -310),
        ("+3.10", 310),
        ("1,234.50", 123450),
        ("1,234,567", 123456700),
        ("(7.25)", -725),
        ("( 1,000 )", -100000),
        ("  8 ", 800),
    ],
)
def test_parse(text, cents):
    assert parse_amount(text) == cents


@pytest.mark.parametrize("text", ["", "-", "1.234", "1,23", "12,3456", "ten", "$5", '"5"', "1|2", "(5"])
def test_not_an_amount(text):
    with pytest.raises(ValueError, match="not an amount"):
        parse_amount(text)


@pytest.mark.parametrize(
    ("cents", "text"), [(0, "0.00"), (5, "0.05"), (-5, "-0.05"), (123450, "1,234.50"), (-123456700, "-1,234,567.00")]
)
def test_format(cents, text):
    assert format_amount(cents) == text


def test_format_with_plus():
    assert format_amount(310, plus=True) == "+3.10"
    assert format_amount(-310, plus=True) == "-3.10"
    assert format_amount(0, plus=True) == "0.00"


@pytest.mark.parametrize("cents", [0, 1, 99, 100, -1, -12345, 99999999])
def test_there_and_back(cents):
    assert parse_amount(format_amount(cents)) == cents
