import pytest

from etude.errors import TaskError
from etude_quickstart.trails import TrailGenerator


def walk(task):
    """The files of a trail in order, by following it."""
    name = task.instruction.split()[1]
    names = [name]
    while (first := task.files[name].split("\n")[0]).startswith("go "):
        name = first.removeprefix("go ")
        names.append(name)
    return names


def test_a_trail_leads_through_all_its_files():
    source = TrailGenerator(3, "train", (4, 60))
    for number in range(50):
        task = source.task(number)
        names = walk(task)
        assert 4 <= len(names) <= 60
        assert sorted(names) == sorted(task.files)


def test_the_key_stands_once_and_early_and_belongs_into_the_last_file():
    source = TrailGenerator(3, "heldout", (100, 100))
    for number in range(20):
        task = source.task(number)
        names = walk(task)
        places = [place for place, name in enumerate(names) if "key" in task.files[name]]
        assert len(places) == 1 and places[0] < 30
        key = task.files[names[places[0]]].split()[-1]
        assert task.solution_files == {names[-1]: f"{key}\n"} and task.allowed_paths == (names[-1],)
        assert key in task.hidden_files["tests/test_hidden.py"]


def test_a_trail_is_a_function_of_seed_split_and_number():
    one, two = TrailGenerator(3, "train", (4, 60)), TrailGenerator(3, "train", (4, 60))
    assert one.task(7) == two.task(7)
    others = [TrailGenerator(4, "train", (4, 60)), TrailGenerator(3, "heldout", (4, 60))]
    assert all(other.task(7).files != one.task(7).files for other in others)


@pytest.mark.parametrize("lengths", [(2, 10), (10, 4), (4, 5000)])
def test_lengths_that_make_no_trail_are_refused(lengths):
    with pytest.raises(TaskError, match="lengths"):
        TrailGenerator(0, "train", lengths)
    with pytest.raises(TaskError, match="lengths"):
        TrailGenerator(0, "train", (4, 10), lengths)


def test_trails_grow_with_their_number_until_the_end_of_the_curriculum():
    source = TrailGenerator(3, "train", (4, 8), (64, 128), grow_over=100)

    def longest(first):
        return max(len(source.task(number).files) for number in range(first, first + 40))

    assert len(source.task(0).files) <= 8
    assert longest(0) < longest(50) < longest(100) <= 128
    assert all(64 <= len(source.task(number).files) <= 128 for number in range(100, 140))
    assert source.task(70) == TrailGenerator(3, "train", (4, 8), (64, 128), grow_over=100).task(70)
