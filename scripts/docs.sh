#!/usr/bin/env bash
# Builds the manual and the API reference as a site, and checks all links.
#
#   scripts/docs.sh [FOLDER]        default: build/docs; the site is FOLDER/site, its first page FOLDER/site/index.html
#
# Needs Debian's mkdocs, doxygen and graphviz. Warnings of any of them are errors.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/build/docs}
for program in mkdocs doxygen dot; do
  command -v "$program" >/dev/null || { echo "docs.sh: '$program' is missing; on Debian: apt-get install mkdocs doxygen graphviz" >&2; exit 78; }
done
rm -rf "$out"
mkdir -p "$out/pages" "$out/site"
out=$(cd "$out" && pwd)

# The pages lie as in the repository, with the files that they link to.
cp "$root"/*.md "$root/LICENSE" "$out/pages/"
cp -r "$root/docs" "$root/examples" "$out/pages/"
mkdir -p "$out/pages/benchmarks" "$out/pages/api"
cp -r "$root/benchmarks/results" "$out/pages/benchmarks/"
rm -rf "$out/pages/docs/site"
echo 'made below' >"$out/pages/api/index.html"
for picture in "$root"/docs/pictures/*.dot; do
  svg=pictures/$(basename "$picture" .dot).svg
  dot -Tsvg "$picture" -o "$out/pages/docs/$svg"
  # The picture in the repository is for those who read the pages there. Other versions of graphviz draw a little differently.
  if [ "$(grep -c "$(dot -V 2>&1 | grep -o '[0-9][0-9.]* (.*')" "$root/docs/$svg")" != 0 ] && ! cmp -s "$root/docs/$svg" "$out/pages/docs/$svg"; then
    echo "docs.sh: docs/$svg is not what its .dot file gives; copy $out/pages/docs/$svg there" >&2
    exit 1
  fi
done
sed -e "s|PAGES|$out/pages|" -e "s|SITE|$out/site|" "$root/docs/site/mkdocs.yml" >"$out/mkdocs.yml"
mkdocs --quiet build --strict --config-file "$out/mkdocs.yml"

# A page for each module, with ARCHITECTURE.md's words, and one for each example.
python3 - "$root" >"$out/modules.dox" <<'PYTHON'
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
text = (root / "ARCHITECTURE.md").read_text()
modules = re.search(r"^## Modules\n(.*?)^## ", text, re.M | re.S).group(1)
print("/** @mainpage Accelerate for C++\nThe interface by module: see Modules on the left. The manual: <a href=\"../index.html\">overview</a>. */")
for name, words in re.findall(r"^\*\*`(\w+)`\*\*: (.*?)(?=\n\n|\Z)", modules, re.M | re.S):
    plain = re.sub(r"`([^`]*)`", r"<tt>\1</tt>", words.replace("@", "\\@").replace("<", "&lt;").replace("#", "\\#"))
    print(f"/** @defgroup {name} {name}\n{plain[0].upper() + plain[1:]} */")
for example in sorted((root / "examples").rglob("*.cpp")):
    print(f"/** @example {example.relative_to(root / 'examples')} */")
PYTHON
{
  sed "s|SITE|$root/docs/site|" "$root/docs/site/Doxyfile"
  echo "INPUT = $root/include $out/modules.dox"
  echo "EXAMPLE_PATH = $root/examples"
  echo "STRIP_FROM_PATH = $root/include"
  echo "STRIP_FROM_INC_PATH = $root/include"
  echo "OUTPUT_DIRECTORY = $out/site"
} >"$out/Doxyfile"
doxygen "$out/Doxyfile"

python3 "$root/docs/site/check_links.py" "$out/site" "$root"
echo "$out/site/index.html"
