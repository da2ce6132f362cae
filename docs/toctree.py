"""Builds the navigation from `source/_toctree.yml`, the one place that lists the pages."""

from pathlib import Path

import yaml


def on_config(config):
    """Called by mkdocs when it has read its configuration."""
    sections = yaml.safe_load((Path(config["docs_dir"]) / "_toctree.yml").read_text(encoding="utf-8"))
    config["nav"] = [
        {section["title"]: [{page["title"]: f"{page['local']}.md"} for page in section["sections"]]}
        for section in sections
    ]
    return config
