"""The forms of applications that `tiercel app check` runs: all there are, each with options that it knows."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tiercel import UserError
from tiercel.apps.app import parse_options
from tiercel.apps.catalogue import all_apps, find_app
from tiercel.apps.check import CHANGES, FORMS, Form, chosen
from tiercel.apps.nexmark.queries import QUERIES
from tiercel.apps.riot.app import RiotOptions
from tiercel.apps.run import Run


def test_every_application_query_and_dataflow_has_a_form() -> None:
    assert {form.app for form in FORMS} == {app.name for app in all_apps()}
    assert {form.options["query"] for form in FORMS if form.app == "nexmark"} == set(QUERIES)
    words = {field.name: set(get_args(field.type)) for field in msgspec.structs.fields(RiotOptions)}
    riot = [parse_options(find_app("riot"), form.options) for form in FORMS if form.app == "riot"]
    for name, values in words.items():
        assert {getattr(options, name) for options in riot} == values, name
    assert {"move", "scale", "kill"} == set(CHANGES)


@pytest.mark.parametrize(
    "form", FORMS, ids=lambda form: f"{form.app} {' '.join(map(str, form.options.values()))}"
)
def test_the_options_and_the_rate_of_a_form_are_allowed(form: Form) -> None:
    app = find_app(form.app)
    options = Run(app, form.options, 1, form.rate, 8.0, CHANGES).check()
    assert next(app.generate(options, 1, form.rate))


def test_an_unknown_application_is_named_with_those_that_exist() -> None:
    assert len(chosen([])) == len(FORMS)
    assert {form.app for form in chosen(["toll"])} == {"toll"}
    with pytest.raises(UserError, match="unknown application 'tolls'"):
        chosen(["tolls"])
