"""Models named by their id on the Hugging Face Hub: read from its cache on this host, or downloaded into it. Cache,
access and offline mode follow the hub library's own variables: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Does
not import torch."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.core.errors import ModelError

MODEL_FILES = ("*.json", "*.jinja", "*.safetensors", "merges.txt", "tokenizer.model")
"""The files of a repository that are downloaded. Pickled weights are not among them."""
_IGNORED = ("*/*", "consolidated*")  # folders, and the same weights in Mistral's own format
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII)
_TRIES = 5
"""Attempts of a download whose connection breaks. The hub library resumes a file itself after most breaks."""
_RETRY_S = 1.0
_CONNECT_S = 10.0
_REPORT_EVERY_S = 5.0

Report = Callable[[str], None]
Check = Callable[[], None]


class HubId(NamedTuple):
    """A repository ``org/name``, and its branch, tag or commit (None: its default branch)."""

    repo: str
    revision: str | None

    @staticmethod
    def of(path: str) -> HubId | None:
        """The id ``org/name`` or ``org/name@revision``; None if ``path`` has another form."""
        found = _ID.fullmatch(path)
        return None if found is None else HubId(*found.groups())

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def download_command(self) -> str:
        """The hub's command that downloads it."""
        return f"hf download {self.repo}" + (f" --revision {self.revision}" if self.revision else "")


def hub_folder(model: HubId, report: Report | None, check: Check, files: Sequence[str] = MODEL_FILES) -> Path:
    """The folder of this host's cache that holds the ``files`` (patterns) of ``model``. Its name is the commit.

    Files that are missing are downloaded, unless ``report`` is None; it gets the progress. ``check`` is called after
    each part (10 MB) and may raise, which ends the download. Complete files are kept then.

    An older hub library does not note whether what it has cached is complete. Such a folder is used as it is if
    ``report`` is None or the hub cannot be reached. `ModelError` if the model cannot be found or downloaded."""
    # Imported here, because this takes 0.6 s.
    import httpx2
    from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    wanted: dict[str, Any] = {
        "repo_id": model.repo,
        "revision": model.revision,
        "allow_patterns": [*files],
        "ignore_patterns": [*_IGNORED],
        "library_name": "pdserve",
    }
    cached: Path | None = None
    try:
        cached = Path(snapshot_download(**wanted, local_files_only=True))
        get_cached_repo_tree(model.repo, revision=cached.name)  # without it the folder may lack files
        return cached
    except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError):
        if report is None:
            if cached is not None:
                return cached
            raise ModelError(f"{model}: {_NOT_HERE}; download it with `{model.download_command}`") from None
    report(f"looking for {model} on the Hugging Face Hub")
    if cached is not None:  # by an older hub library; without a connection, a listing takes 23 s to fail
        try:
            HfApi().model_info(model.repo, revision=cached.name, timeout=_CONNECT_S)
        except (httpx2.ConnectError, httpx2.TimeoutException) as error:
            report(f"{constants.ENDPOINT} cannot be reached ({_words(error)}): {model} is used as it is in the cache")
            return cached
        except OSError:
            pass  # is explained below
    failures = 0
    while True:
        check()
        try:
            folder = Path(snapshot_download(**wanted, tqdm_class=_progress(f"downloading {model}", report, check)))
        except httpx2.TransportError as error:
            failures += 1
            if failures == _TRIES:
                what = (
                    f"the download was interrupted {_TRIES} times ({_words(error)}); repeat it: complete files are kept"
                )
                raise ModelError(f"{model}: {what}") from None
            report(f"the download was interrupted ({_words(error)}); complete files are kept")
            time.sleep(_RETRY_S)
        except OSError as error:  # the hub library's errors are OSErrors, too
            raise ModelError(f"{model}: {_explained(model, error)}") from None
        else:
            report(f"{model} is complete at commit {folder.name}")
            return folder


_NOT_HERE = "there is no such folder, and no such model in this host's cache of the Hugging Face Hub"


def _explained(model: HubId, error: OSError) -> str:
    """What is wrong, and what helps."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    elsewhere = (
        f"run `{model.download_command} --local-dir FOLDER` on a host that reaches the hub, copy FOLDER, and give its "
        "path instead of the id"
    )
    match error:
        case errors.GatedRepoError():
            return f"access has to be granted at {hub}/{model.repo}; then set HF_TOKEN or run `hf auth login`"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no such folder, and {hub} has no such model, or not for you: check the name; for a private "
                "model set HF_TOKEN or run `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            return (
                f"{model.repo} has no branch, tag or commit {model.revision}; {hub}/{model.repo}/tree/main lists them"
            )
        case errors.HfHubHTTPError() if error.response.status_code == 401:
            return f"{hub} refuses the token; set HF_TOKEN to a valid one, or run `hf auth login`"
        case errors.HfHubHTTPError():
            return f"{hub} answers with an error ({_words(error)}); try again later"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return f"{_NOT_HERE}, and HF_HUB_OFFLINE forbids downloads: unset it, or {elsewhere}"
        case errors.LocalEntryNotFoundError():
            return f"{_NOT_HERE}, and {hub} cannot be reached ({_words(error.__cause__ or error)}): {elsewhere}"
        case _:
            return f"it cannot be stored in {constants.HF_HUB_CACHE}: {_words(error)}"


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _progress(doing: str, report: Report, check: Check) -> type[Any]:
    """A class for the hub library's progress bars that reports instead of drawing, unless they are disabled
    (HF_HUB_DISABLE_PROGRESS_BARS)."""
    from huggingface_hub.utils.tqdm import tqdm

    bars: dict[str, Any] = {}  # by unit: bytes, and files
    reported_s = time.monotonic()

    class Bar(tqdm):
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})  # type: ignore[no-untyped-call]
            if not self.disable:
                bars[self.unit] = self

        def update(self, n: float | None = 1) -> Any:
            nonlocal reported_s
            check()
            done = super().update(n)
            if time.monotonic() - reported_s >= _REPORT_EVERY_S and {"B", "it"} <= bars.keys():
                reported_s = time.monotonic()
                report(f"{doing}: {bars['B'].n / 1e6:,.0f} MB, {bars['it'].n} of {bars['it'].total} files complete")
            return done

    return Bar
