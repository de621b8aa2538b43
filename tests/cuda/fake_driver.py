"""A driver of a few lines, for what is said of drivers. (Collectives run on the stand-in.)"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = """
#include <string.h>
static int init(unsigned flags) { return INIT; }
static int version(int* to) { *to = VERSION; return 0; }
static int count(int* to) { *to = DEVICES; return 0; }
static int get(int* to, int ordinal) { *to = ordinal; return 0; }
static int name(char* to, int size, int device) { strcpy(to, "Fake GPU"); return 0; }
static int attribute(int* to, int which, int device) {
  *to = which == 75 ? CAPABILITY / 10 : which == 76 ? CAPABILITY % 10 : 0;
  return 0;
}
static int reaches(int* to, int device, int peer) { *to = REACHES; return 0; }
static int error_name(int error, const char** to) { *to = "CUDA_ERROR_OF_A_TEST"; return 0; }
static int error_text(int error, const char** to) { *to = "made up"; return 0; }
static int other(void) { return 999; }
int cuGetProcAddress_v2(const char* asked, void** to, int at, unsigned long flags, int* found) {
  static const struct { const char* name; void* function; } all[] = {
      {"cuInit", init}, {"cuDriverGetVersion", version}, {"cuDeviceGetCount", count},
      {"cuDeviceGet", get}, {"cuDeviceGetName", name}, {"cuDeviceGetAttribute", attribute},
      {"cuDeviceCanAccessPeer", reaches}, {"cuGetErrorName", error_name},
      {"cuGetErrorString", error_text}};
  *found = strcmp(asked, LACKS) == 0;
  *to = *found ? 0 : (void*)other;
  for (int i = 0; i < 9; ++i)
    if (strcmp(asked, all[i].name) == 0) *to = all[i].function;
  return 0;
}
// As they are called without it.
int cuInit(unsigned flags) { return init(flags); }
int cuDriverGetVersion(int* to) { return version(to); }
int cuDeviceGetCount(int* to) { return count(to); }
int cuDeviceGetName(char* to, int size, int device) { return name(to, size, device); }
int cuDeviceGetAttribute(int* to, int which, int device) { return attribute(to, which, device); }
"""


def build(
    folder: Path, init=0, devices=2, version=13000, lacks="", reaches=1, capability=90
) -> str:
    """The library's path: what `cuInit` gives, how many devices, which function is not there,
    whether GPUs can map each other, and what they are: 90 is compute capability 9.0."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / "libfake_cuda.so"
    numbers = {"INIT": init, "DEVICES": devices, "VERSION": version, "LACKS": f'"{lacks}"'}
    numbers["REACHES"] = reaches
    numbers["CAPABILITY"] = capability
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)),
            *(f"-D{name}={of}" for name, of in numbers.items()),
        ],
        input=SOURCE,
        text=True,
        check=True,
        timeout=60,
    )
    return str(library)
