"""Shapes in signatures are checked at run time in every test. The matrices are small: one thread is fastest."""

import os

for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(
    ["acemerge.linalg", "acemerge.covariance", "acemerge.frame", "acemerge.methods", "acemerge.task_vectors", "acemerge.api"],
    "beartype.beartype",
)

# A busy machine is no failure: nothing here may depend on how long an example takes.
settings.register_profile("acemerge", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# `make fuzz`: other random numbers every time, as many examples as are asked for.
settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fuzz" if "FUZZ_EXAMPLES" in os.environ else "acemerge")
