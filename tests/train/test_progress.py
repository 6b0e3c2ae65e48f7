"""What a person sees of a training."""

import io

from rich.console import Console

from intbmoe.train.progress import TrainingProgress


def shown(terminal, quiet):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200, soft_wrap=not terminal)
    progress = TrainingProgress("digits/switch/0", 10, quiet, console)
    progress.start(4)
    progress.advance(5)
    progress.measure(5, 64)
    progress.show(5, "train", {"loss": 0.25, "lr": 0.001, "entropy": 0.5}, 64)
    progress.show(5, "valid", {"accuracy": 0.75}, 64)
    progress.say("a note")
    progress.warn("a warning")
    progress.stop()
    return output.getvalue()


def test_plain_lines_in_a_log():
    lines = shown(terminal=False, quiet=False).splitlines()
    assert lines[0] == "digits/switch/0: 10 steps, resuming after step 4"
    assert lines[1].startswith("digits/switch/0  step 5/10  train  loss 0.25  lr 0.001  ")
    assert "examples/s" in lines[1]
    assert lines[1].endswith("left")
    assert lines[2] == "digits/switch/0  step 5/10  valid  accuracy 0.75"
    assert lines[3:] == ["a note", "a warning"]


def test_a_bar_on_a_terminal():
    text = shown(terminal=True, quiet=False)
    assert "━" in text
    assert "5/10" in text
    assert "examples/s" in text
    assert "a note" in text


def test_quiet_leaves_warnings_only():
    assert shown(terminal=False, quiet=True) == "a warning\n"
