"""Pictures of graphs: as text for a terminal, as a Mermaid flowchart, as SVG."""
