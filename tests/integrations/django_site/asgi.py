"""For uvicorn."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "integrations.django_site.settings")
app = get_asgi_application()
