"""Training and searches of other libraries on a cluster: the models are those that are trained without one."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_scikit_learn_searches_through_joblib(client: Client) -> None:
    pytest.importorskip("sklearn")
    import joblib
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GridSearchCV

    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 5))
    y = x @ np.arange(5) + rng.normal(size=200)

    def search() -> GridSearchCV:
        return GridSearchCV(Ridge(), {"alpha": [0.01, 0.1, 1.0, 10.0, 100.0]}, cv=4, n_jobs=2).fit(x, y)

    alone = GridSearchCV(Ridge(), {"alpha": [0.01, 0.1, 1.0, 10.0, 100.0]}, cv=4).fit(x, y)
    with joblib.parallel_backend("dask"):
        found = search()
    assert found.best_params_ == alone.best_params_
    np.testing.assert_allclose(found.cv_results_["mean_test_score"], alone.cv_results_["mean_test_score"])


def test_lightgbm_trains(client: Client) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    pytest.importorskip("sklearn")
    da = pytest.importorskip("dask.array")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 4))
    y = x[:, 0] * 3 + x[:, 1]
    options = {"n_estimators": 20, "num_leaves": 7, "min_child_samples": 5, "verbose": -1}
    alone = lightgbm.LGBMRegressor(**options).fit(x, y)
    model = lightgbm.DaskLGBMRegressor(client=client, **options)
    model.fit(da.from_array(x, chunks=(500, 4)), da.from_array(y, chunks=500))
    found = model.predict(da.from_array(x, chunks=(500, 4))).compute()
    # Histograms of parts are merged, so trees may differ a little.
    assert np.mean((found - y) ** 2) < 2 * np.mean((alone.predict(x) - y) ** 2) + 0.05
