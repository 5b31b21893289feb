"""`hybridrl push`: uploads an HF directory to the hub with huggingface_hub. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hybridrl.errors import UserError
from hybridrl.models.hf.directory import CONFIG_FILE, read_config
from hybridrl.models.hf.headers import HfHeaders

# Files of an HF directory; other files (optimizer states, logs) are not uploaded.
UPLOADED = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt", "README.md")


def upload(folder: Path, name: str, private: bool, revision: str | None) -> str:
    """Uploads an HF directory, whose files' headers are checked; returns the commit's URL.

    `name` is 'organisation/name'; the repository is created if it does not exist, `private` or not.
    `revision` is a branch; None for main.

    Raises:
        UserError: The folder is not a complete HF directory, or the hub refuses the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    if not os.path.isfile(folder / CONFIG_FILE):
        allowed = f"an HF directory with {CONFIG_FILE}"
        remedy = "Create one with checkpoint.export_hf=true or `hybridrl convert --to hf`."
        raise UserError(str(folder), "no such folder or file", allowed, remedy)
    read_config(folder)
    HfHeaders(folder)
    api = HfApi()
    try:
        made = api.create_repo(name, private=private, exist_ok=True, repo_type="model")
        if revision is not None:
            api.create_branch(made.repo_id, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            revision=revision,
            allow_patterns=list(UPLOADED),
            commit_message=f"Upload {folder.name}",
        )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        allowed = "a repository to which this host's token may write"
        said = " ".join(str(error).split())[:200]
        remedy = "Correct the name, or log in with `hf auth login`."
        raise UserError(f"hub repository {name}", said, allowed, remedy) from error
    return str(done.commit_url)


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="HF directory.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="organisation/name on the hub.")],
    private: Annotated[
        bool, typer.Option(help="If the repository is new, make it private.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; default: main.")] = None,
) -> None:
    """Upload an HF directory to the hub."""
    typer.echo(upload(folder, name, private, revision))
