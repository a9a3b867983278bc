import os
import signal
import threading
import time

import pytest

from etude.controller.stopping import StopSignal
from etude.observe.observer import RecordingObserver, SilentObserver


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks_to_stop(number: signal.Signals) -> None:
    observer = RecordingObserver()
    with StopSignal(observer) as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
    assert len(observer.lines) == 1
    assert "stopping after this step" in observer.lines[0]


def test_the_second_signal_stops_at_once() -> None:
    with StopSignal(SilentObserver()):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_while_a_run_prepares_the_first_signal_stops_at_once() -> None:
    with StopSignal(SilentObserver()) as stop:
        with pytest.raises(KeyboardInterrupt), stop.preparing():
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop


def test_handlers_are_put_back_however_it_ends() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopSignal(SilentObserver()):
        assert signal.getsignal(signal.SIGINT) != before[0]
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_time_of_a_sitting_runs_out_like_a_signal_and_earlier_sittings_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with StopSignal(SilentObserver(), max_wall_s=5.0, already_s=101.0) as stop:
        now_s[0] += 4.9
        assert not stop
        assert stop.elapsed_s == pytest.approx(105.9)
        now_s[0] += 0.2
        assert stop
    with StopSignal(SilentObserver(), max_wall_s=0.0, already_s=1e9) as stop:
        assert not stop


def test_outside_the_main_thread_only_the_time_counts() -> None:
    outcome: list[bool] = []

    def run() -> None:
        with StopSignal(SilentObserver(), max_wall_s=1e-9) as stop:
            outcome.append(bool(stop))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcome == [True]
    assert signal.getsignal(signal.SIGINT) is before
