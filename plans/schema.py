"""The JSON Schema of the plan document."""

import json

from .document import Plan


def schema_json() -> str:
    """The schema as text, as it is committed beside this module: field names and types are a public surface."""
    return json.dumps(Plan.model_json_schema(mode="serialization"), indent=2, sort_keys=True) + "\n"
