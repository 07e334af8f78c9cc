"""The pages of the service: one module of routes for each question that a person has; see the table in cli/README.md.

``views`` holds plain functions from plans to what a template shows, ``templates`` what is shown, ``static`` one style
sheet and the scripts. A page works without scripts; they make it live.
"""
