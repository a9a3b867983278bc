import configparser
from pathlib import Path

settings = configparser.ConfigParser()
settings.read(Path("~/.config/demo.ini").expanduser())
assert settings["demo"]["level"] == "3"
