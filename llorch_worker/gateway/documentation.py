"""``/openapi.json``, and ``/docs``: the same for people, who may try each request there."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache, cached_property
from importlib.resources import files
from importlib.util import find_spec

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi

from llorch_worker.gateway.console.files import HEADERS, TYPES, policy
from llorch_worker.gateway.errors import HttpError

PACKAGE = "fastapi_offline"
"""Has the files of Swagger UI, of which nothing else is used."""
_INTRODUCTION = """Answers of the models that workers serve, in the shapes of OpenAI's, Anthropic's
and vLLM's APIs, and as jobs: sent now, read later, cancelled in between. `GET /v1/models` names the
models. `POST /v1/chat/completions` is where most begin; "Try it out" sends its example."""
_WITH_KEY = " Every request needs a key of this gateway: see Authorize."
_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)

router = APIRouter(include_in_schema=False)


class Documentation:
    """The description of ``app``, made when somebody asks for it first."""

    def __init__(self, app: FastAPI, *, needs_key: bool) -> None:
        self._app = app
        self._needs_key = needs_key

    @cached_property
    def content(self) -> bytes:
        """It takes half a second to make."""
        document = get_openapi(
            title=self._app.title,
            version=self._app.version,
            description=_INTRODUCTION + (_WITH_KEY if self._needs_key else ""),
            routes=self._app.routes,
        )
        for path in document["paths"].values():
            for operation in path.values():
                # FastAPI would name the function.
                said, *more = re.split(r"\.\s+", operation["description"], maxsplit=1)
                operation["summary"] = " ".join(said.split()).removesuffix(".")
                operation["description"] = "".join(more)
                # FastAPI documents a 422 that :func:`errors.install` never lets it answer.
                operation["responses"].pop("422", None)
        if self._needs_key:
            schemes = {"key": {"type": "http", "scheme": "bearer"}}
            document["components"]["securitySchemes"] = schemes
            document["security"] = [{"key": []}]
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


# Plain functions, which FastAPI runs in threads: none may stop the event loop.


@router.get("/openapi.json")
def openapi(request: Request) -> Response:
    found: Documentation = request.app.state.documentation
    return Response(found.content, media_type="application/json")


@router.get("/docs")
def docs(request: Request) -> Response:
    """Swagger UI, which loads nothing from elsewhere. Its addresses hold behind any proxy."""
    if find_spec(PACKAGE) is None:
        message = "this page needs `pip install fastapi-offline`; /openapi.json says the same"
        raise HttpError(501, "NOT_INSTALLED", message)
    here = "../" if request.scope["raw_path"].endswith(b"/") else ""
    css, js = (f"{here}docs/{name}" for name in _FILES)
    page = get_swagger_ui_html(
        openapi_url=f"{here}openapi.json",
        title=request.app.title,
        swagger_css_url=css,
        swagger_js_url=js,
        swagger_favicon_url=f"{here}console/icon.svg",
        swagger_ui_parameters={"defaultModelsExpandDepth": -1},
    )
    text = bytes(page.body).decode()
    scripts = " ".join(map(_source, _INLINE.findall(text)))
    # The page styles its elements itself, and has icons in its style.
    allowed = policy(
        **{"script-src": f"'self' {scripts}", "style-src": "'self' 'unsafe-inline'"},
        **{"img-src": "'self' data:"},
    )
    return Response(text, media_type="text/html", headers=HEADERS | allowed)


def _source(script: str) -> str:
    """What a policy calls this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@router.get("/docs/{name}")
def docs_file(name: str) -> Response:
    """Raises ``HTTPException`` 404."""
    if name not in _FILES or find_spec(PACKAGE) is None:
        raise HTTPException(404)
    kind = TYPES[name[name.rindex(".") :]]
    return Response(_read(name), headers=HEADERS | {"Content-Type": kind})


@cache
def _read(name: str) -> bytes:
    return (files(PACKAGE) / "static" / name).read_bytes()
