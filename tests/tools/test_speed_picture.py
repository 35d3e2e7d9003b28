"""The picture of speeds is that of the tables of docs/benchmarks.md, losses included."""

from tools.speed_picture import PAGE, PICTURE, Regime, picture, regimes

TABLE = """**A machine** (a day):

| regime | ratio, T = 0 | 95 % interval |
|---|---:|---:|
| [one stream, to `x`](runs.md#a) | 1.50 | 1.25 to 2.00 |
| the same: slower | 0.50 | 0.40 to 0.60 |
"""


def test_the_picture_is_in_step_with_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert PICTURE.read_text(encoding="utf-8") == picture(page), "run python -m tools.speed_picture"
    assert len(regimes(page)) == 3 and any(row.ratio < 1 for rows in regimes(page).values() for row in rows)


def test_every_row_is_drawn_with_its_interval_and_losses_stand_out() -> None:
    assert regimes(TABLE) == {
        "A machine": [
            Regime("one stream, to x", 1.5, (1.25, 2.0)),
            Regime("the same: slower", 0.5, (0.4, 0.6)),
        ]
    }
    drawn = picture(TABLE)
    assert drawn.count("<circle") == 2 and drawn.count('<circle class="slower"') == 1
    assert picture(TABLE.replace("0.50", "0.51")) != drawn
