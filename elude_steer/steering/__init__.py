"""Concepts to edits to captions: settings, plans, regions, interventions, recipes, reports, exports."""
