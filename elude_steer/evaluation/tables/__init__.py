"""The paper's tables on any backbone and any images: methods, measures, stability, efficiency, properties, collages."""
