"""Puts a folder on the Hugging Face hub, with the hub's own client.

Address and token are where that client has them: HF_ENDPOINT, HF_TOKEN, or what `hf auth login`
left. Knows nothing about what is in the folder.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from metatrainer.errors import ConfigError, MetatrainerError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,94}/[A-Za-z0-9][\w.-]{0,94}", re.ASCII)
_FAULTS = (httpx.HTTPError, OSError)
"""What the client raises; connections by way of Xet fail with errors of the system."""


def check(repo: str) -> None:
    """See that a folder could be pushed, before there is one. Changes nothing.

    repo: OWNER/NAME. Raises ConfigError for another form, no token, a token that is refused, and a
    hub that cannot be reached.
    """
    if not _NAME.fullmatch(repo):
        raise ConfigError(f"{repo!r} is not OWNER/NAME, such as ada/my-agent")
    if not get_token():
        raise ConfigError("no token of the Hugging Face hub; set HF_TOKEN, or: hf auth login")
    api = HfApi()
    try:
        api.whoami()
    except _FAULTS as error:
        raise ConfigError(_said(api, error)) from None


def push(folder: Path, repo: str) -> str:
    """Make the repository, a private one, if it is not there, and commit the folder to it.

    Returns its address. Raises MetatrainerError; the folder stays as it is.
    """
    api = HfApi()
    try:
        made = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Add the trained agent")
    except _FAULTS as error:
        raise MetatrainerError(
            f"{_said(api, error)}\n{folder} is written; once that is mended: hf upload {repo} "
            f"{folder}"
        ) from None
    return str(made)


def _said(api: HfApi, error: Exception) -> str:
    """What went wrong, in one line, and what to do."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return f"{api.endpoint} refuses the token; make one that may write, and set HF_TOKEN"
    if status == 403:
        return f"the token may not write there ({api.endpoint}); make one that may, set HF_TOKEN"
    if status is not None:
        return f"{api.endpoint} answers with status {status}"
    return f"cannot reach {api.endpoint}: {type(error).__name__}; try again, or see HF_ENDPOINT"
