import pytest

from etude.errors import TaskError
from etude.tasks.trails import TrailGenerator


def walk(task):
    """The files of a trail in order, by following it."""
    name = task.instruction.split()[1]
    names = [name]
    while (first := task.files[name].split("\n")[0]).startswith("go "):
        name = first.removeprefix("go ")
        names.append(name)
    return names


def test_a_trail_leads_through_all_its_files():
    source = TrailGenerator(3, "train", 4, 60)
    for number in range(50):
        task = source.task(number)
        names = walk(task)
        assert 4 <= len(names) <= 60
        assert sorted([*names, "answer.py"]) == sorted(task.files)


def test_the_keys_stand_early_and_the_question_comes_last():
    source = TrailGenerator(3, "heldout", 100, 100)
    for number in range(20):
        task = source.task(number)
        names = walk(task)
        found = [(place, task.files[name].split("\n")[1].split()) for place, name in enumerate(names)]
        keys = {words[0]: words[1] for _, words in found if words}
        assert len(keys) == 2 and max(place for place, words in found if words) < 30
        asked = task.files[names[-1]].split()[1]
        assert asked not in task.instruction
        assert task.solution_files == {"answer.py": f"ANSWER = {keys[asked]}\n"}
        assert f"== {keys[asked]}" in task.hidden_files["tests/test_hidden.py"]


def test_a_trail_is_a_function_of_seed_split_and_number():
    one, two = TrailGenerator(3, "train", 4, 60), TrailGenerator(3, "train", 4, 60)
    assert one.task(7) == two.task(7)
    others = [TrailGenerator(4, "train", 4, 60), TrailGenerator(3, "heldout", 4, 60)]
    assert all(other.task(7).files != one.task(7).files for other in others)


@pytest.mark.parametrize("lengths", [(3, 10), (10, 4), (4, 5000)])
def test_lengths_that_make_no_trail_are_refused(lengths):
    with pytest.raises(TaskError, match="lengths"):
        TrailGenerator(0, "train", *lengths)
