"""The pages: one to try the network on an image, in the look of the report, and one that lists the
routes.
"""

from importlib.resources import files
from typing import Any

import jinja2

from qualms import report
from qualms.service.answers import About
from qualms.service.uploads import FORMATS
from qualms.version import __version__


def front_page(about: About, token: bool, ready: bool) -> str:
    """Drop an image, see the decision. The data come from the routes, with the token if there is
    one.

    Until the network is ready, the page asks how far it is, and can be used once it is.
    """
    shared = [
        (files(report) / name).read_text("utf-8") for name in ("page.values.js", "page.charts.js")
    ]
    scripts = "".join([*shared, _own("page.js")])
    title = f"{about.model}: what does it know?"
    return _filled(
        "page.html.jinja", title=title, about=about, token=token, ready=ready, js=scripts
    )


def docs_page(schema: dict[str, Any]) -> str:
    """The routes of an OpenAPI schema, to read."""
    return _filled("docs.html.jinja", title=schema["info"]["title"], schema=schema)


def _filled(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    css = (files(report) / "page.css").read_text("utf-8")
    made = environment.from_string(_own(template))
    return made.render(css=css, version=__version__, formats=", ".join(FORMATS), **values)


def _own(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")
