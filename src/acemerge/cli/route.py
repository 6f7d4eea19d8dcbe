"""`acemerge route`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acemerge.cli.flags import AsJson
from acemerge.cli.printing import print_json
from acemerge.errors import printable

if TYPE_CHECKING:
    from acemerge.routing.index import Index


def route_command(
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER...", help="LoRA adapters of one base: folders or hub ids, two or more.")
    ],
    centroids: Annotated[
        Path,
        typer.Option(help="A .safetensors file with a vector for each adapter, by its name: the mean of its rows' embeddings."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The index, a file. It appears only when it is whole.")],
    base: Annotated[
        str | None, typer.Option(help="The base of the adapters; by default what their settings name.", metavar="MODEL")
    ] = None,
    beta: Annotated[float, typer.Option(help="Width of the kernel: the smaller, the fewer adapters count for a query.")] = 0.2,
    tau: Annotated[float, typer.Option(help="Adapters with no larger share of the weights are left out.")] = 0.01,
    top: Annotated[int, typer.Option(min=1, help="Adapters that are merged for a query, at most.")] = 50,
    offline: Annotated[
        bool, typer.Option("--offline", help="Never touch the network; hub ids come from the local cache.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Many adapters, of which the fitting ones are merged for each query: write the index for that.

        acemerge route lora-0 lora-1 --centroids centroids.safetensors -o team.route

    In Python, acemerge.load_routed("team.route", embed=...) gives the model. A query's weights follow from the distance of its
    embedding to the centroids; printed is what they are at the centroids themselves.
    """
    from acemerge.errors import InputError
    from acemerge.routing.index import Kernel, read_index, write_index

    if not (beta > 0 and beta < float("inf")):
        raise InputError(f"--beta {beta}: give a number above 0")
    if not 0 <= tau < 1:
        raise InputError(f"--tau {tau}: give a share from 0 to less than 1")
    write_index(adapters, centroids, output, base=base, kernel=Kernel(beta=beta, tau=tau, top=top), offline=offline)
    index = read_index(output)
    if as_json:
        print_json({"index": output.name, **index.record.model_dump()})
    else:
        _print_index(index)


def _print_index(index: Index) -> None:
    from acemerge.routing.weights import sparse_weights

    record, kernel = index.record, index.record.kernel
    names = list(record.adapters)
    for name, centroid in zip(names, index.centroids, strict=True):
        weights = sparse_weights(centroid, index.centroids, kernel.beta, kernel.tau, kernel.top).tolist()
        counting = sorted(((w, other) for w, other in zip(weights, names, strict=True) if w > 0), reverse=True)
        shown = ", ".join(f"{other} {w:.2f}" for w, other in counting[:4]) + ", ..." * (len(counting) > 4)
        own = record.adapters[name].left_out
        print(printable(f"  {name}: {shown or 'the base alone'}" + (f"  (left out: {', '.join(own)})" if own else "")))
    about = f"{len(names)} adapters, centroids of {index.centroids.shape[1]} numbers"
    print(f"{index.file}: {about}, beta {kernel.beta}, tau {kernel.tau}, top {kernel.top}")
