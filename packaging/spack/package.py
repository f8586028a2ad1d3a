"""Spack's recipe of onnx-recompute: copy it to var/spack/repos/REPOSITORY/packages/py-onnx-recompute/package.py.

`spack dev-build py-onnx-recompute@0.1.0` in a checkout installs this checkout.
"""

from spack.package import *


class PyOnnxRecompute(PythonPackage):
    """An ONNX-native static-graph training compiler with recomputation."""

    license("Apache-2.0")

    version("0.1.0")

    variant("cpu", default=True, description="Compiled kernels for the CPU")
    variant("plot", default=False, description="Pictures of memory over a step")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-onnx@1.17:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.5:", type=("build", "run"))
    depends_on("py-safetensors@0.4.3:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-numba@0.60:", when="+cpu", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", when="+plot", type=("build", "run"))
