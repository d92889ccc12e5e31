"""Build the simulated CUDA device: ``python tests/simulated_cuda/build.py``; prints its folder, or why there is none.

The headers are those that the CUDA build of PyTorch brings along. A build is kept until a source or PyTorch changes.
"""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent
BUILDS = SOURCES / "build"
LIBRARY = "libsimulated_cuda.so"
CUDA = "13"  # the runtime whose functions runtime.cpp has


class BuildError(Exception):
    """Says why there is no simulated device here."""


def build() -> Path:
    """The folder of the simulated device, built if need be."""
    import torch

    if sys.platform != "linux" or shutil.which("g++") is None:
        raise BuildError("it is built by g++ on Linux")
    if not (torch.version.cuda or "").startswith(f"{CUDA}."):
        raise BuildError(f"it needs a build of PyTorch for CUDA {CUDA}, and this is {torch.__version__}")
    folder = BUILDS / _key(torch.__version__)
    if not folder.exists():
        _compile(Path(torch.__file__).parent, folder)
    return folder


def _key(version: str) -> str:
    """Names what a build depends on."""
    parts = [path.read_bytes() for path in (Path(__file__), *sorted(SOURCES.glob("*.cpp")), *SOURCES.glob("*.h"))]
    return hashlib.sha256(b"".join([sys.version.encode(), version.encode(), *parts])).hexdigest()[:16]


def _compile(torch: Path, folder: Path) -> None:
    """Both compilers at once, into a folder that gets its name when all is there."""
    site, draft = torch.parent, folder.with_suffix(".draft")
    shutil.rmtree(BUILDS, ignore_errors=True)  # older builds
    draft.mkdir(parents=True)
    headers = [
        *sorted({str(path.parent) for path in site.glob("nvidia/*/include/cuda_runtime_api.h")})[:1],
        str(site / "triton/backends/nvidia/include"),  # crt/host_defines.h
    ]
    if len(headers) < 2:
        raise BuildError("PyTorch's CUDA packages are installed without headers")
    compiler = f"libnvrtc.so.{CUDA}"  # PyTorch asks for it by this name, which the real one beside it has too
    (draft / "versions").write_text(f"{compiler} {{ global: nvrtc*; }};\n")
    common = ["g++", "-fPIC", "-shared", *(f"-I{folder}" for folder in headers)]
    device = [
        *common,
        "-std=c++17",
        "-O2",
        f"-Wl,--version-script={draft / 'versions'},-soname,{compiler}",
        "-o",
        str(draft / LIBRARY),
    ]
    device += [str(SOURCES / f"{name}.cpp") for name in ("device", "runtime", "driver", "libraries")]
    values = [
        *common,
        "-std=c++20",
        "-O1",
        "-DTORCH_EXTENSION_NAME=simulated_values",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
    ]
    includes = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    values += [f"-I{folder}" for folder in includes] + ["-o", str(draft / "simulated_values.so")]
    values += [str(SOURCES / "values.cpp"), f"-L{torch / 'lib'}"]
    values += [f"-l{name}" for name in ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda", "torch_python")]
    running = [subprocess.Popen(command) for command in (device, values)]
    codes = [process.wait() for process in running]
    if any(codes):
        raise BuildError("its sources do not compile")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", compiler):
        (draft / name).symlink_to(LIBRARY)  # one library under all names: loaded once
    draft.rename(folder)


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as reason:
        sys.exit(f"no simulated CUDA device: {reason}")
