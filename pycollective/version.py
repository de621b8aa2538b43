"""The version, which all ranks of a job must share."""

VERSION = "0.1.0"
