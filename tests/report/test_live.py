"""The live view: plain lines without a terminal, a redrawn view on a terminal, or silence on
request.
"""

from __future__ import annotations

import io

import pytest

from xrl_jax.report.live import LiveProgress
from xrl_jax.search.base import Progress


def state(seconds: float, best: float = 4e-3) -> Progress:
    """Return the progress of a search with a budget of 60 s after `seconds`."""
    return Progress("descending", 8e-3, best, 1234, 56, 60.0 - seconds)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep environment variables of this machine from deciding whether something is a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")


def shown(file: io.StringIO, moments: list[float], *, progress: bool = True) -> str:
    clock = Clock()
    with LiveProgress("tiny", 60.0, file=file, clock=clock, progress=progress) as live:
        for seconds in moments:
            clock.now = 100.0 + seconds
            live(state(seconds))
    return file.getvalue()


def test_a_plain_line_at_most_every_ten_seconds() -> None:
    facts = "descending; best 4.00 ms predicted (2.00 x); 1,234 candidates; 56 measured"
    assert shown(io.StringIO(), [0.0, 3.0, 9.9, 10.0, 15.0, 42.0]).splitlines() == [
        f"[   0 s] tiny: {facts}; 60 s left",
        f"[  10 s] tiny: {facts}; 50 s left",
        f"[  42 s] tiny: {facts}; 18 s left",
    ]


def test_before_anything_is_found_there_is_no_ratio() -> None:
    file = io.StringIO()
    with LiveProgress("tiny", 60.0, file=file, clock=Clock()) as live:
        live(state(0.0, best=float("inf")))
    assert "descending; best unknown predicted; 1,234" in file.getvalue()


def test_a_terminal_shows_the_same_facts_and_is_cleared() -> None:
    text = shown(Terminal(), [0.0, 0.1, 1.0])
    for fact in ("tiny: descending", "best 4.00 ms predicted (2.00 x)", "56 measured"):
        # Twice, as the call after 0.1 s came too soon, and once when the view is closed.
        assert text.count(fact) == 3, fact
    assert "59 s left" in text
    assert text.endswith("\x1b[2K")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert shown(Terminal(), [0.0]).startswith("[   0 s] tiny: descending; ")


def test_a_message_stays_visible() -> None:
    plain, terminal, silent = io.StringIO(), Terminal(), io.StringIO()
    for file, progress in ((plain, True), (terminal, True), (silent, False)):
        with LiveProgress("net", 60.0, progress=progress, file=file) as live:
            live.say("this takes [long]")
    assert plain.getvalue() == "net: this takes [long]\n"
    assert "net: this takes [long]" in terminal.getvalue()
    assert silent.getvalue() == ""


def test_silent_on_request() -> None:
    assert shown(io.StringIO(), [0.0, 20.0], progress=False) == ""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_closed_file_only_silences_the_progress_display(kind: type[io.StringIO]) -> None:
    file, clock = kind(), Clock()
    with LiveProgress("tiny", 60.0, file=file, clock=clock) as live:
        file.close()
        for seconds in (0.0, 20.0):
            clock.now = 100.0 + seconds
            live(state(seconds))


def test_an_encoding_that_lacks_the_bar_does_not_stop_the_search() -> None:
    class Ascii(Terminal):
        def write(self, text: str) -> int:
            text.encode("ascii")
            return super().write(text)

    shown(Ascii(), [0.0, 1.0, 2.0])


def test_an_error_of_the_search_passes_through() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        LiveProgress("tiny", 60.0, file=Terminal(), clock=Clock()),
    ):
        raise KeyboardInterrupt
