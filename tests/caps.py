#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the size of the project with the limits in tests/caps.txt, and prints each figure. Exits with 1 if one is exceeded.
Lower a limit in the commit that makes the project smaller; whoever adds something finds the lines elsewhere."""
import os
import re
import subprocess
import sys

from includes import includes_of

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
files = subprocess.run(['git', 'ls-files'], capture_output=True, text=True, check=True).stdout.split()
files = [f for f in files if os.path.exists(f)]  # not those that the next commit removes
code = [f for f in files if f.endswith(('.hpp', '.cpp', '.cu'))]
product = [f for f in code if not f.startswith(('tests/', 'bench/'))]


def text(path):
    with open(path, encoding='utf-8') as file:
        return file.read()


def lines(paths):
    return sum(text(f).count('\n') for f in paths)


def reached(start):
    """Our files that a source includes, directly or not."""
    seen, todo = set(), [start]
    while todo:
        for path in includes_of(todo.pop()):
            if path in product and path not in seen:
                seen.add(path)
                todo.append(path)
    return seen


def flags(paths):
    """Declarations such as flag("bs", ...) and flag_range(bs, "bs", ...)."""
    return sum(len(re.findall(r'\b(?:flag|flag_\w+)\(\s*[a-z_0-9.]+\s*,\s*"', text(f))) for f in paths)


figures = {
    'product lines': lines(product),
    'product files': len(product),
    'test lines': lines(f for f in code if f.startswith('tests/')),
    'files that train.cpp reaches': len(reached('train.cpp')),
    'flags of train': flags(['config.hpp', 'augment.hpp']),
    'flags of all programs': flags(f for f in product if not f.startswith(('lib/', 'base/'))),
    'lines of bench/': lines(f for f in files if f.startswith('bench/') and not f.endswith('.md')),
    'lines of bench/RESULTS.md': lines(['bench/RESULTS.md']),
    'lines of docs/': lines(f for f in files if f.startswith('docs/') and f.endswith('.md')),
}
limits = dict(re.findall(r'^(\S.*\S) +(\d+)$', text('tests/caps.txt'), re.M))
for name, figure in figures.items():
    limit = int(limits[name])
    print('%-30s %6d of %6d%s' % (name, figure, limit, '' if figure <= limit else '  EXCEEDED'))
sys.exit(any(figure > int(limits[name]) for name, figure in figures.items()))
