"""`pdserve plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.cli.options import stdout_console
from pdserve.core.errors import InvalidRequest

_FORMATS = ("png", "svg", "pdf", "csv")


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs")],
    formats: Annotated[str, typer.Option("--format", help="png, svg, pdf, csv (several with commas)")] = "png",
    output: Annotated[Path, typer.Option(help="folder for the pictures; it is made")] = Path("plots"),
) -> None:
    """Draw runs into one set of pictures: exposed transfer over prompt length, goodput over rate, and the distributions
    of the stages, as far as the runs have the data. Needs no service.

    csv writes the data of each picture. Several runs share the pictures, named by their folders."""
    from experiments.catalogue import run_of
    from experiments.overview import Source, pictures
    from experiments.run_folder import RunFolder

    chosen = [part.strip() for part in formats.split(",") if part.strip()]
    unknown = [each for each in chosen if each not in _FORMATS]
    if unknown or not chosen:
        raise InvalidRequest(f"format: {(unknown or [''])[0]!r} is none of {', '.join(_FORMATS)}")
    folders = [RunFolder.open(path, "RUN") for path in runs]
    sources = []
    for folder in folders:
        data = folder.load()
        label = f"{data.name}/{folder.path.resolve().name}" if len(folders) > 1 else ""
        sources.append(Source(label, data, run_of(folder).summarise(data)))
    found = pictures(sources)
    if not found:
        raise InvalidRequest("RUN: the runs have nothing to draw: no request was recorded with a breakdown")
    output.mkdir(parents=True, exist_ok=True)
    console = stdout_console()
    for picture in found:
        for kind_of_file in chosen:
            path = output / f"{picture.stem}.{kind_of_file}"
            if kind_of_file == "csv":
                picture.frame().to_csv(path, index=False)
            else:
                path.write_bytes(picture.file(kind_of_file))
            console.print(str(path), markup=False, soft_wrap=True)
