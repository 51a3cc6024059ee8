"""SageMaker's GPU instance types and their prices.

Prices are on-demand list prices of real-time inference in PRICE_REGION, as of PRICE_DATE. They change over time.
"""

from __future__ import annotations

from dataclasses import dataclass

PRICE_DATE = "August 2026"
PRICE_REGION = "us-east-1"
HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class Instance:
    num_gpus: int
    gpu: str
    price: float | None  # USD per hour; None: unknown


INSTANCES = {
    "ml.g5.xlarge": Instance(1, "A10G 24 GB", 1.408),
    "ml.g5.2xlarge": Instance(1, "A10G 24 GB", 1.515),
    "ml.g5.4xlarge": Instance(1, "A10G 24 GB", 2.03),
    "ml.g5.12xlarge": Instance(4, "A10G 24 GB", 7.09),
    "ml.g5.48xlarge": Instance(8, "A10G 24 GB", 20.36),
    "ml.g6.xlarge": Instance(1, "L4 24 GB", 1.127),
    "ml.g6.2xlarge": Instance(1, "L4 24 GB", 1.222),
    "ml.g6.4xlarge": Instance(1, "L4 24 GB", 1.654),
    "ml.g6.12xlarge": Instance(4, "L4 24 GB", 5.752),
    "ml.g6.48xlarge": Instance(8, "L4 24 GB", 16.688),
    "ml.g6e.xlarge": Instance(1, "L40S 48 GB", 2.61),
    "ml.g6e.2xlarge": Instance(1, "L40S 48 GB", 2.80),
    "ml.g6e.4xlarge": Instance(1, "L40S 48 GB", 3.76),
    "ml.g6e.12xlarge": Instance(4, "L40S 48 GB", 13.12),
    "ml.g6e.48xlarge": Instance(8, "L40S 48 GB", 37.66),
    "ml.g7e.2xlarge": Instance(1, "RTX PRO 6000 96 GB", None),
    "ml.g7e.12xlarge": Instance(2, "RTX PRO 6000 96 GB", None),
    "ml.g7e.24xlarge": Instance(4, "RTX PRO 6000 96 GB", None),
    "ml.g7e.48xlarge": Instance(8, "RTX PRO 6000 96 GB", None),
    "ml.p4d.24xlarge": Instance(8, "A100 40 GB", None),
    "ml.p4de.24xlarge": Instance(8, "A100 80 GB", None),
    "ml.p5.4xlarge": Instance(1, "H100 80 GB", None),
    "ml.p5.48xlarge": Instance(8, "H100 80 GB", None),
    "ml.p5e.48xlarge": Instance(8, "H200 141 GB", None),
    "ml.p5en.48xlarge": Instance(8, "H200 141 GB", None),
    "ml.p6-b200.48xlarge": Instance(8, "B200 180 GB", None),
}
