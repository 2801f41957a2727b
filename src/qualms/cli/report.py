"""`qualms report`: one page about a network, its data and the methods."""

import json
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from qualms.cli.bench import LEARNT_FROM, PUBLISHED, chosen, rows_file
from qualms.cli.options import Device, Root, Seed, device_of, listed, telling
from qualms.cli.subject import subject
from qualms.data import Images, load
from qualms.errors import QualmsError
from qualms.report.content import Content, Group
from qualms.report.layers import layers_of
from qualms.report.page import write_page
from qualms.tasks.rows import Row, Rows
from qualms.tasks.scoring import scored, usable
