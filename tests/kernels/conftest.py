"""Gives each test class of a suite its own list of cases."""


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", metafunc.cls.cases, ids=lambda case: case.name)
