"""What must hold for every registered task: data, model, loss and metrics; serving; what analyses show."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from export.small_runs import small_recipe
from intbmoe.recipes import recipe_from_dict, recipe_to_dict
from intbmoe.registry import _tasks
from intbmoe.tasks import Task, find_task, list_preparations, list_tasks, make_task, register_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.serving import RequestError
from intbmoe.tasks.serving.requests import from_wire, to_wire

NAMES = [name for name in list_tasks() if find_task(name).__module__.startswith("intbmoe.")]
FEW = [3, 0, 5, 2]
DECIDES = {
    "vision": ("accuracy", True, False),
    "language": ("loss", False, True),
    "sequences": ("HR@10", True, True),
    "travel": ("HR@5", True, True),
}
"""The metric, whether higher is better, and whether models may not look ahead."""


@pytest.fixture(scope="module", params=NAMES)
def task(request, tmp_path_factory):
    return make_task(small_recipe(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def model(task):
    torch.manual_seed(0)
    return task.make_model().eval()


@pytest.fixture(scope="module")
def predictor(task, model):
    found = task.catalogue()
    artifact = SimpleNamespace(
        recipe=task.recipe, catalogue=found.about, catalogue_tensors=found.tensors, model=lambda device: model
    )
    return task.find_predictor().load(artifact, "cpu")


def batch_of(task, indices=FEW, split="valid"):
    return task.prepare(task.split(split).batch(indices, epoch=0, seed=0), None)


def test_it_is_found_by_the_name_that_its_recipes_carry(task):
    assert isinstance(task, Task)
    assert find_task(task.recipe.task) is type(task)
    assert task.name == task.recipe.task
    assert (task.metric, task.higher_is_better, task.causal) == DECIDES[task.name]
    assert recipe_from_dict(recipe_to_dict(task.recipe)) == task.recipe


def test_splits_have_examples_and_others_are_refused(task):
    for name in ("train", "valid", "test"):
        assert len(task.split(name)) > 0
    with pytest.raises(KeyError, match=r"no split is called 'validation': did you mean 'valid'\?"):
        task.split("validation")


@pytest.mark.parametrize("split", ["train", "valid"])
def test_an_example_does_not_depend_on_the_batch_around_it(task, split):
    examples = task.split(split)
    together = examples.batch(FEW, epoch=1, seed=7)
    for row, index in enumerate(FEW):
        for name, value in examples.batch([index], epoch=1, seed=7).items():
            assert torch.equal(value[0], together[name][row]), name


def test_losses_and_metrics_come_from_sums(task, model):
    with torch.no_grad():
        parts = [task.evaluate(model, batch_of(task, part)) for part in (FEW, FEW[:2], FEW[2:])]
    whole, first, second = ({name: float(value) for name, value in sums.items()} for sums in parts)
    assert whole == pytest.approx({name: first[name] + second[name] for name in whole}, rel=1e-4)
    metrics = task.metrics(whole)
    assert task.metric in metrics
    assert all(isinstance(value, float) for value in metrics.values())
    with pytest.raises(ValueError, match="count"):
        task.metrics(dict.fromkeys(whole, 0.0))


def test_each_example_by_itself_adds_up_to_the_batch(task, model):
    batch = batch_of(task)
    with torch.no_grad():
        whole, each = task.evaluate(model, batch), task.evaluate_examples(model, batch)
        alone = [task.evaluate(model, batch_of(task, [index])) for index in FEW]
    assert each.keys() == whole.keys()
    for name, values in each.items():
        assert values.shape == (len(FEW),), name
        assert float(values.double().sum()) == pytest.approx(float(whole[name]), rel=1e-5), name
        assert values.double().tolist() == pytest.approx([float(of[name]) for of in alone], rel=1e-4, abs=1e-5), name


def test_a_training_batch_reaches_every_parameter(task):
    model = task.make_model().train()
    batch = task.prepare(task.split("train").batch(FEW, epoch=0, seed=0), torch.Generator().manual_seed(0))
    total, count = task.loss(model, batch)
    assert int(count) > 0
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_flops_are_counted_at_batch_one_and_scores_are_numbers(task, model):
    with torch.no_grad():
        model(*task.example_inputs())
        assert task.run_model(model, batch_of(task), torch.float32).isfinite().all()


def test_graphs_take_the_entries_of_a_batch(task, model):
    graph = task.graph()
    wrapped = graph.wrap(model, task.catalogue().tensors)
    batch = batch_of(task)
    for rows, length in graph.shapes_to_try(batch):
        inputs = graph.inputs({name: value[:rows] for name, value in batch.items()}, torch.float32, length)
        with torch.no_grad():
            assert len(wrapped(*inputs)) == rows
    assert len(graph.dynamic_shapes()) == len(graph.names)


def test_golden_and_example_requests_are_answered(task, predictor):
    requests = [*task.golden_requests(predictor, 3), *predictor.request_schema["examples"]]
    batch = [from_wire(to_wire(predictor.encode(request))) for request in requests]
    answers = predictor.answer(batch)
    assert len(answers) == len(requests)
    assert all("results" in answer or "text" in answer for answer in answers)
    [alone] = predictor.answer(batch[:1])
    assert alone.keys() == answers[0].keys()
    assert predictor.summary.endswith(".")


def test_a_request_with_a_wrong_field_is_refused_by_its_name(predictor):
    example = predictor.request_schema["examples"][0]
    with pytest.raises(RequestError, match="colour"):
        predictor.encode({**example, "colour": 1})
    for name in predictor.request_schema["required"]:
        with pytest.raises(RequestError, match=name):
            predictor.encode({key: value for key, value in example.items() if key != name})


def test_explained_answers_name_the_tokens_of_every_layer(task, predictor):
    request = {**predictor.request_schema["examples"][0], "explain": True}
    [answer] = predictor.answer([predictor.encode(request)])
    assert answer["blocks"]
    assert all(len(layer["tokens"]) == len(answer["tokens"]) for layer in answer["blocks"])


def test_its_form_is_the_one_its_script_makes(task):
    form = task.find_predictor().form
    assert form is None or f'forms["{form.stem}"]' in form.read_text()


def test_views_label_every_token_or_none(task, model):
    batch = batch_of(task)
    for view in task.views():
        labels = view.find(batch)
        assert len(labels) == len(FEW)
        assert int(labels.min()) >= -1
        assert int(labels.max()) < len(view.labels)


def test_shown_examples_are_of_the_split(task):
    split = task.split("valid")
    shown = task.shown(split)
    assert shown.indices
    batch = task.prepare(split.batch(shown.indices, epoch=0, seed=0), None)
    for row, index in enumerate(shown.indices):
        content = shown.describe(batch, row, index)
        assert content.title
        assert any(token is not None for token in content.tokens)


def test_a_task_that_only_learns_says_what_else_it_cannot(monkeypatch):
    monkeypatch.setitem(_tasks, "bare", None)
    monkeypatch.delitem(_tasks, "bare")

    @register_task("bare")
    class Bare(Task):
        recipe_type = Recipe

    task = make_task(Recipe("test", "bare", None, SimpleNamespace()))
    with pytest.raises(ValueError, match="the task 'bare' cannot be served: it defines no predictor"):
        task.find_predictor()
    evaluate = partial(task.evaluate_examples, None, {})
    for lacking in (task.make_model, lambda: task.split("test"), lambda: task.loss(None, {}), evaluate):
        with pytest.raises(NotImplementedError, match="Bare does not define"):
            lacking()
    assert (task.views(), task.shown([]), task.floors()) == ([], None, {})
    assert task.metrics({"count": 2, "loss": 3.0}) == {"loss": 1.5}


def test_preparations_are_the_tasks_own():
    assert {"inttravel", "minipile", "wikipedia"} <= set(list_preparations())
    assert all(found.summary for found in list_preparations().values())
