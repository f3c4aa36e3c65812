"""Linear Road as a Spark batch job: what every notification, balance and expenditure must be.

Responsible for: the rules once more, over all rows at once, in SQL.
Not responsible for: the comparison.

Windows over the reports of a car find its trips, its crossings and where it stood still; joins find accidents
and the statistics of the minutes before.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

_STEPS = """
WITH before AS (
    SELECT *, time DIV 60 + 1 AS minute,
           lag(lane) OVER car AS was_lane, lag(xway) OVER car AS was_xway, lag(dir) OVER car AS was_dir,
           lag(seg) OVER car AS was_seg, lag(pos) OVER car AS was_pos
    FROM {reports} WHERE type = 0 WINDOW car AS (PARTITION BY vid ORDER BY at)),
steps AS (
    SELECT *, was_lane IS NULL OR was_lane = 4 AS fresh,
           coalesce(was_lane <> 4 AND was_xway = xway AND was_dir = dir AND was_lane = lane AND was_pos = pos,
                    false) AS same
    FROM before)
SELECT *, sum(if(same, 0, 1)) OVER (PARTITION BY vid ORDER BY at) AS run FROM steps"""

_ACCIDENTS = """
WITH numbered AS (SELECT *, row_number() OVER (PARTITION BY vid, run ORDER BY at) AS equal FROM {steps}),
stops AS (
    SELECT s.*, m.at AS moved_at, m.time AS moved FROM numbered s
    LEFT JOIN numbered m ON m.vid = s.vid AND m.run = s.run + 1 AND m.equal = 1 WHERE s.equal = 4)
SELECT a.xway, a.dir, a.seg, a.lane, a.pos,
       greatest(a.time, b.time) DIV 60 + 1 AS first, least(a.moved, b.moved) DIV 60 + 1 AS last
FROM stops a JOIN stops b
  ON a.xway = b.xway AND a.dir = b.dir AND a.lane = b.lane AND a.pos = b.pos AND a.vid < b.vid
WHERE least(a.moved_at, b.moved_at) IS NULL OR greatest(a.at, b.at) < least(a.moved_at, b.moved_at)"""

_TOLLS = """
WITH means AS (SELECT xway, dir, seg, minute, vid, avg(spd) AS mean FROM {steps} GROUP BY ALL),
minutes AS (SELECT xway, dir, seg, minute, avg(mean) AS average, count(*) AS cars FROM means GROUP BY ALL),
entering AS (
    SELECT * FROM {steps}
    WHERE lane <> 4 AND (fresh OR was_xway <> xway OR was_dir <> dir OR was_seg <> seg)),
asked AS (SELECT DISTINCT xway, dir, seg, minute FROM entering),
known AS (
    SELECT q.xway, q.dir, q.seg, q.minute,
           array_sort(collect_list(if(m.minute IS NULL, NULL, struct(m.minute, m.average)))) AS past,
           coalesce(max(if(m.minute = q.minute - 1, m.cars, NULL)), 0) AS cars
    FROM asked q LEFT JOIN minutes m
      ON q.xway = m.xway AND q.dir = m.dir AND q.seg = m.seg
     AND m.minute BETWEEN q.minute - 5 AND q.minute - 1
    GROUP BY ALL),
ahead AS (
    SELECT q.xway, q.dir, q.seg, q.minute, min_by(a.seg, abs(a.seg - q.seg)) AS accident
    FROM asked q JOIN {accidents} a
      ON q.xway = a.xway AND q.dir = a.dir
     AND (a.seg - q.seg) * if(q.dir = 0, 1, -1) BETWEEN 0 AND 4
     AND q.minute > a.first AND (a.last IS NULL OR q.minute <= a.last)
    GROUP BY ALL),
priced AS (
    SELECT k.xway, k.dir, k.seg, k.minute, k.cars, a.accident,
           if(size(past) = 0, -1,
              int(aggregate(past, 0D, (sum, one) -> sum + one.average) / size(past))) AS lav
    FROM known k LEFT JOIN ahead a USING (xway, dir, seg, minute))
SELECT vid, time, at, e.xway, e.dir, e.seg, p.accident, p.lav,
       int(if(p.lav >= 40 OR p.cars <= 50 OR p.accident IS NOT NULL, 0,
              2 * (p.cars - 50) * (p.cars - 50))) AS toll
FROM entering e JOIN priced p USING (xway, dir, seg, minute)"""

_NOTICES = """
SELECT 0 AS kind, vid, time, at, xway, dir, seg, lav, toll, -1 AS qid FROM {tolls}
UNION ALL
SELECT 1, vid, time, at, xway, dir, accident, -1, 0, -1 FROM {tolls} WHERE accident IS NOT NULL"""

_BALANCES = """
WITH doings AS (
    SELECT vid, at, time, toll, true AS enters, xway, dir, seg FROM {tolls}
    UNION ALL SELECT vid, at, time, 0, false, xway, dir, seg FROM {steps} WHERE lane = 4),
charged AS (
    SELECT *, lead(at) OVER car AS charged_at,
           lead(enters) OVER car OR lead(seg) OVER car <> seg OR lead(xway) OVER car <> xway
               OR lead(dir) OVER car <> dir AS charges
    FROM doings WINDOW car AS (PARTITION BY vid ORDER BY at))
SELECT q.vid, q.time, q.at, q.qid, int(coalesce(max(if(c.enters, c.time, NULL)), 0)) AS resultTime,
       int(coalesce(sum(if(c.charged_at <= q.at AND c.charges, c.toll, 0)), 0)) AS balance
FROM {reports} q LEFT JOIN charged c ON c.vid = q.vid AND c.at <= q.at
WHERE q.type = 2 GROUP BY q.vid, q.time, q.at, q.qid"""

_SPENT = """
SELECT vid, time, at, qid, day, int((vid * 7919 + day * 104729) % 90 + 10) AS toll
FROM {reports} WHERE type = 3"""


def expected(spark: SparkSession, reports: DataFrame) -> dict[str, DataFrame]:
    """The rows of each output, from rows of every type."""
    steps = spark.sql(_STEPS, None, reports=reports).cache()
    accidents = spark.sql(_ACCIDENTS, None, steps=steps)
    tolls = spark.sql(_TOLLS, None, steps=steps, accidents=accidents).cache()
    return {
        "notices": spark.sql(_NOTICES, None, tolls=tolls),
        "balances": spark.sql(_BALANCES, None, tolls=tolls, steps=steps, reports=reports),
        "expenditures": spark.sql(_SPENT, None, reports=reports),
    }
