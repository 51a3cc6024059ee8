"""All settings and their defaults, one file per subject. Import the names from this package."""

from peagle.config.data import *
from peagle.config.engine import *
from peagle.config.evaluation import *
from peagle.config.models import *
from peagle.config.sampling import *
from peagle.config.serving import *
from peagle.config.training import *
