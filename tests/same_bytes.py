#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the SHA-256 of what must not change in the outputs of a run, for same_bytes.sh: of a checkpoint all but its
settings and what older versions stored for flags that are gone, of metrics.csv the steps, AP and validation loss. Reads
checkpoints without torch.

  same_bytes.py FILE.pth... FILE.csv..."""
import csv
import hashlib
import pickle
import sys
import zipfile


SKIPPED = 'settings', 'flags', 'chosen', 'lowest_loss', 'lr_factor', 'rollbacks'


class Reader(pickle.Unpickler):
    """A tensor becomes its bytes, shape and strides."""

    def __init__(self, archive):
        self.folder = next(n for n in archive.namelist() if n.endswith('/data.pkl'))[:-len('data.pkl')]
        self.archive = archive
        super().__init__(archive.open(self.folder + 'data.pkl'))

    def find_class(self, module, name):
        if name == 'OrderedDict':
            return dict
        return name if name.endswith('Storage') else lambda *arguments: (name, arguments)

    def persistent_load(self, storage):
        return hashlib.sha256(self.archive.read(self.folder + 'data/' + storage[2])).hexdigest(), storage[1]


def without_settings(value):
    if isinstance(value, dict):
        return {k: without_settings(v) for k, v in value.items() if k not in SKIPPED}
    return [without_settings(v) for v in value] if isinstance(value, (list, tuple)) else value


for path in sys.argv[1:]:
    if path.endswith('.csv'):
        rows = list(csv.DictReader(open(path)))
        value = [[row['iteration'], row['AP'], row['val_loss']] for row in rows if row['AP']]
    else:
        value = without_settings(Reader(zipfile.ZipFile(path)).load())
    print(hashlib.sha256(repr(value).encode()).hexdigest(), path)
