"""Sums over entries, and tables of them."""

from ledgerline.amounts import format_amount


def balances(entries, opening=0):
    """The balance after each entry."""
    result = []
    balance = opening
    for entry in entries:
        balance += entry.cents
        result.append(balance)
    return result


def by_tag(entries, *, untagged="other"):
    """The sum of each tag, largest spending first; an entry of two tags counts in full for both."""
    sums = {}
    for entry in entries:
        for tag in entry.tags or (untagged,):
            sums[tag] = sums.get(tag, 0) + entry.cents
    return dict(sorted(sums.items(), key=lambda item: (item[1], item[0])))


def monthly(entries):
    """Per month: what came in, what went out, and the difference. Months without entries are there with zeros."""
    months = {}
    for entry in entries:
        received, spent = months.get(entry.month, (0, 0))
        if entry.cents > 0:
            received += entry.cents
        else:
            spent -= entry.cents
        months[entry.month] = (received, spent)
    return [(month, *months.get(month, (0, 0))) for month in _months_between(months)]


def _months_between(months):
    if not months:
        return
    month, last = min(months), max(months)
    while month <= last:
        yield month
        year, number = map(int, month.split("-"))
        if number == 12:
            year, number = year + 1, 0
        month = f"{year:04}-{number + 1:02}"


def render_table(entries, opening=0):
    """The ledger as text: days, amounts and balances in columns, amounts aligned at the right."""
    rows = [
        (f"{entry.day:%Y-%m-%d}", format_amount(entry.cents, plus=True), format_amount(balance), entry.what)
        for entry, balance in zip(entries, balances(entries, opening))  # noqa: B905 - Python 3.9
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = []
    for day, amount, balance, what in rows:
        line = f"{day:<{widths[0]}}  {amount:>{widths[1]}}  {balance:>{widths[2]}}  {what}"
        lines.append(line.rstrip())
    return "\n".join(lines)
