"""From concepts to captions: settings, plans, regions, interventions, the steerer, recipes, reports, exports."""
