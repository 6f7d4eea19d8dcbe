#!/bin/sh
# Installs PACKAGE, a wheel or source archive, into an empty environment by the versions of LOCK, and uses it from outside the repository:
#   try_package.sh PACKAGE LOCK PYTHON
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
package=$(realpath "$1")
lock=$(realpath "$2")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$3" -m venv "$folder/environment"
PATH=$folder/environment/bin:$PATH
cd "$folder"
export PIP_DISABLE_PIP_VERSION_CHECK=1
python -m pip install --quiet -c "$lock" --upgrade pip
python -m pip install --quiet -c "$lock" --build-constraint "$lock" "$package"

python -m pip check
installed=$(python -c 'import acemerge; print(acemerge.__path__[0])')
case $installed in "$folder"/*) ;; *) echo "not the installed package: $installed" >&2 && exit 1 ;; esac
diff -r -x __pycache__ "$root/src/acemerge" "$installed"  # every module, and every file that is none
acemerge --help > /dev/null
python "$root/tests/support/core_only.py" models
echo "$(basename "$package"): installed, whole, and works"
