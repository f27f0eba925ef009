#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the direction of includes: no cycles, and no include of a file in a higher layer. Reads the #include "..."
lines of all sources but those of tests/ and bench/. Prints what is wrong and exits with 1.

A new file needs no entry if its folder has one. The longest prefix that fits a path decides."""
import glob
import os
import re
import sys

# Lowest first. A file may include files of its own layer and of those above it in this list.
LAYERS = [
    ['lib/base/'],
    ['lib/images/', 'lib/layers/'],
    ['yolox.hpp', 'augment.hpp', 'lib/data/'],
    ['models/', 'models.hpp', 'simota.hpp', 'loss.hpp', 'data.hpp', 'formats.hpp'],
    ['lib/checkpoint/', 'optim.hpp', 'lib/coco_eval.', 'lib/dtr/', 'lib/ddp/', 'ddp.hpp'],
    ['evaluate.hpp', 'config.hpp'],
    ['lib/run/'],
    ['train.cpp', 'eval.cpp', 'demo.cpp', 'export.cpp', 'pack.cpp'],
]
# These may include nothing else of the project. The model can be copied to another project with these folders alone.
ONLY = {
    'yolox.hpp': ['lib/layers/', 'lib/base/'],
    'lib/layers/': ['lib/layers/', 'lib/base/'],
    'lib/base/': ['lib/base/'],
    'lib/data/loader.': ['lib/data/loader.', 'lib/data/batch.', 'lib/images/', 'lib/base/'],
}
# Files that the build writes.
GENERATED = {'onnx.pb.h'}


def layer_of(path):
    fits = [(len(prefix), i) for i, layer in enumerate(LAYERS) for prefix in layer if path.startswith(prefix)]
    return max(fits)[1] if fits else None


def includes_of(path):
    with open(path, encoding='utf-8') as file:
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read(), re.M)
    return [name if os.path.exists(name) else 'lib/' + name for name in names if name not in GENERATED]


def cycles(graph):
    """Returns each cycle that a depth-first search meets."""
    found, done, path = [], set(), []

    def visit(node):
        if node in path:
            found.append(path[path.index(node):] + [node])
        elif node not in done:
            path.append(node)
            for to in graph.get(node, []):
                visit(to)
            path.pop()
            done.add(node)
    for node in sorted(graph):
        visit(node)
    return found


def problems(graph):
    found = []
    for path, names in sorted(graph.items()):
        own = layer_of(path)
        if own is None:
            found.append('%s is in no layer; add it to LAYERS in tests/includes.py' % path)
            continue
        for name in names:
            other = layer_of(name)
            if name not in graph:
                found.append('%s includes "%s", which is not there; give the path from the top folder or from lib/' % (path, name))
            elif other is not None and other > own:
                found.append('%s includes %s, which is of a higher layer' % (path, name))
            for prefix, allowed in ONLY.items():
                if path.startswith(prefix) and not any(name.startswith(a) for a in allowed):
                    found.append('%s includes %s, but %s may include only %s' % (path, name, prefix, ', '.join(allowed)))
    return found + ['a cycle: ' + ' -> '.join(cycle) for cycle in cycles(graph)]


if __name__ == '__main__':
    os.chdir(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
    paths = [p for end in ('*.hpp', '*.cpp') for p in glob.glob(end) + glob.glob('*/' + end) + glob.glob('lib/*/' + end)]
    sources = [p for p in paths if not re.match(r'(tests|bench|build[^/]*)/', p)]
    wrong = problems({path: includes_of(path) for path in sources})
    print('\n'.join(wrong) if wrong else '%d files, %d layers' % (len(sources), len(LAYERS)))
    sys.exit(bool(wrong))
