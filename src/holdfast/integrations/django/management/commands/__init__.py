"""``manage.py holdfast`` and ``manage.py migrate --lock``."""
