"""What the tests in a browser share."""

WIDTHS = (1440, 768, 390)


def percent(share: float) -> str:
    return f"{round(100 * share + 1e-9, 1):g}\N{NO-BREAK SPACE}%"
