"""Pages and navigation of Dask's dashboard: what is touched of the scheduler's HTTP server.

Read in 2026.8.0 and pinned by `tests/scheduler_adapter/test_dashboard.py`. Bokeh is there if the dashboard is, and imported only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed.scheduler import Scheduler
from tornado.ioloop import IOLoop

from scheduler_adapter.dask_internals import Undo

#: Makes a page: called with the scheduler, variables for the template, and the new document.
Page = Callable[[Scheduler, dict[str, Any], Any], None]


def has_dashboard(scheduler: Scheduler) -> bool:
    """Whether pages are served: `Scheduler.__init__` adds Bokeh's application to `http_application.applications` then."""
    return _application(scheduler) is not None


def add_pages(scheduler: Scheduler, undo: Undo, pages: Mapping[str, Page]) -> None:
    """Serve each page at its path, and list it in the navigation of all pages, before `info`.

    As `distributed.dashboard.scheduler.connect` does it, with an application of our own: that one takes no more pages once it runs. Its
    template variables are made once a scheduler, and all pages share the list that is the navigation.
    """
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables

    there = _application(scheduler)
    if there is None:
        return
    variables = template_variables(scheduler)
    ours = BokehApplication(pages, scheduler, prefix=there.prefix, template_variables=variables)
    navigation: list[str] = variables["pages"]
    names = [path.strip("/") for path in pages]
    at = navigation.index("info") if "info" in navigation else len(navigation)
    navigation[at:at] = names
    scheduler.http_application.add_application(ours)
    ours.initialize(IOLoop.current())
    ours.start()

    def back() -> None:
        for name in names:
            navigation.remove(name)
        scheduler.http_application.applications.remove(ours)
        ours.stop()

    undo.step(back)


def _application(scheduler: Scheduler) -> Any:
    applications = getattr(getattr(scheduler, "http_application", None), "applications", ())
    # Without importing Bokeh, which takes long, where there is none.
    return next((app for app in applications if type(app).__name__ == "DaskBokehTornado"), None)
