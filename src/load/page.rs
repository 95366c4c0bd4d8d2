//! The report as one HTML file with its plots inside: no script, no font, no request to anywhere.
//! Rule a change could break: what comes from outside (names, error texts) is escaped.

use std::fmt::Write as _;

use super::figures::StepFigures;
use super::report::{self, ms};
use super::run::{Outcome, Sample};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 64.0;
const BOTTOM: f64 = 30.0;
const TOP: f64 = 12.0;
const RIGHT: f64 = 14.0;
/// Lines told apart by colour, also by people who do not see red and green alike.
const COLOURS: &[&str] = &["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999"];

/// `text` where markup is not wanted.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// One axis: how a value becomes a place between 0 and 1, and which values are written beside it.
enum Axis {
    Linear {
        max: f64,
        step: f64,
    },
    Log {
        min: f64,
        max: f64,
    },
    /// Percentiles: 90, 99, 99.9 stand equally far apart.
    Nines,
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        match self {
            Axis::Linear { max, step: _ } => value / max,
            Axis::Log { min, max } => (value.max(*min) / min).ln() / (max / min).ln(),
            Axis::Nines => -(1.0 - value.min(99.999) / 100.0).log10() / 5.0,
        }
        .clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        match self {
            Axis::Linear { max, step } => {
                let decimals = usize::from(*step < 1.0) + usize::from(*step < 0.1);
                (0..=(max / step).round() as u32)
                    .map(|n| step * f64::from(n))
                    .map(|v| (v, format!("{v:.decimals$}")))
                    .collect()
            }
            Axis::Log { min, max } => {
                let mut ticks = Vec::new();
                let mut value = *min;
                while value <= max * 1.001 {
                    ticks.push((value, format!("{value}")));
                    value *= 10.0;
                }
                ticks
            }
            Axis::Nines => [0.0, 90.0, 99.0, 99.9, 99.99, 99.999].map(|v| (v, format!("{v}"))).to_vec(),
        }
    }
}

/// A linear axis with round steps, about five of them.
fn linear(lines: &[Line], of: fn(&(f64, f64)) -> f64) -> Axis {
    let top = lines.iter().flat_map(|l| &l.points).map(of).fold(0.01, f64::max);
    let rough = top / 5.0;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].iter().map(|m| m * decade).find(|s| *s >= rough).unwrap_or(decade * 10.0);
    Axis::Linear { max: (top / step).ceil() * step, step }
}

/// A logarithmic axis over whole decades.
fn decades(lines: &[Line]) -> Axis {
    let values = || lines.iter().flat_map(|l| &l.points).map(|p| p.1).filter(|v| *v > 0.0);
    let (low, high) = (values().fold(f64::MAX, f64::min), values().fold(0.01, f64::max));
    let min = 10f64.powf(low.clamp(0.01, 1e6).log10().floor());
    Axis::Log { min, max: 10f64.powf(high.log10().ceil()).max(min * 10.0) }
}

fn plot(title: &str, x_name: &str, x: &Axis, y: &Axis, lines: &[Line]) -> String {
    let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let at_x = |v: f64| LEFT + wide * x.place(v);
    let at_y = |v: f64| TOP + high * (1.0 - y.place(v));
    let mut svg = format!("<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\">", escaped(title));
    for (value, label) in y.ticks() {
        let line = at_y(value);
        let _ = write!(
            svg,
            "<path d=\"M{LEFT} {line:.1}H{}\" class=\"grid\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            line + 4.0
        );
    }
    for (value, label) in x.ticks() {
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{}\">{label}</text>",
            at_x(value),
            HEIGHT - BOTTOM + 16.0,
            if x.place(value) > 0.98 { "end" } else { "middle" }
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
        WIDTH - RIGHT,
        HEIGHT - 2.0,
        escaped(x_name)
    );
    for (n, line) in lines.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        // When colours come round again the line is broken, on the plot and in its key.
        let dash = if n < COLOURS.len() { "" } else { " stroke-dasharray=\"5 3\"" };
        let mut path = String::new();
        for (px, py) in &line.points {
            let _ = write!(path, "{}{:.1} {:.1}", if path.is_empty() { "M" } else { "L" }, at_x(*px), at_y(*py));
        }
        let _ = write!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\"{dash}/>");
    }
    svg.push_str("</svg><p class=\"key\">");
    for (n, line) in lines.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let _ = write!(
            svg,
            "<span><i style=\"border-top:3px {} {colour}\"></i>{}</span>",
            if n < COLOURS.len() { "solid" } else { "dashed" },
            escaped(&line.name)
        );
    }
    svg.push_str("</p></figure>");
    svg
}

fn by_step(rows: &[StepFigures], points: fn(&StepFigures) -> Vec<(f64, f64)>) -> Vec<Line> {
    rows.iter()
        .filter(|r| r.count > 0)
        .map(|r| Line { name: format!("{} / {}", r.group, r.step), points: points(r) })
        .collect()
}

fn by_sample(samples: &[Sample], name: &str, look: fn(&Sample) -> f64) -> Line {
    Line { name: name.to_owned(), points: samples.iter().map(|s| (s.at_s, look(s))).collect() }
}

/// The page.
#[must_use]
pub fn html(outcome: &Outcome) -> String {
    let scenario = &outcome.scenario;
    let good = outcome.is_good();
    let rows = &outcome.rows;
    // A point in time without any step says nothing about latency.
    let p50 = by_step(rows, |r| r.course.iter().filter(|p| p.per_s > 0.0).map(|p| (p.at_s, p.p50_ms)).collect());
    let p99 = by_step(rows, |r| r.course.iter().filter(|p| p.per_s > 0.0).map(|p| (p.at_s, p.p99_ms)).collect());
    let rate = by_step(rows, |r| r.course.iter().map(|p| (p.at_s, p.per_s)).collect());
    let quantiles = by_step(rows, |r| r.percentiles.clone());
    let cpu = vec![by_sample(&outcome.samples, "CPU % of a core", |s| s.cpu_percent)];
    let memory = vec![by_sample(&outcome.samples, "resident MiB", |s| s.usage.rss_kib as f64 / 1024.0)];
    let counts = vec![
        by_sample(&outcome.samples, "threads", |s| s.usage.threads as f64),
        by_sample(&outcome.samples, "open files", |s| s.usage.fds as f64),
        by_sample(&outcome.samples, "agents", |s| s.usage.children as f64),
    ];
    let x = |lines: &[Line]| linear(lines, |p| p.0);
    let y = |lines: &[Line]| linear(lines, |p| p.1);

    let mut out = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{name}</title><style>\
         body{{font:15px/1.45 system-ui,sans-serif;max-width:920px;margin:24px auto;padding:0 16px;color:#222}}\
         table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px;width:100%}}\
         td,th{{padding:3px 8px;text-align:right;border-bottom:1px solid #ddd}}\
         td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){{text-align:left}}\
         figure{{margin:22px 0}}figcaption{{font-weight:600}}svg{{width:100%;height:auto}}\
         svg text{{font-size:11px;fill:#555}}.grid{{stroke:#e4e4e4}}\
         .key span{{margin-right:14px;white-space:nowrap;font-size:12px}}.key i{{display:inline-block;width:14px;margin-right:5px;vertical-align:middle}}\
         .key{{margin:2px 0 0 {LEFT}px}}.good{{color:#00664b}}.bad{{color:#b3001b}}pre{{white-space:pre-wrap;font-size:12px;background:#f6f6f6;padding:10px}}\
         </style><h1>{name}: <span class=\"{class}\">{word}</span></h1><p>{about}</p>",
        name = escaped(&scenario.name),
        about = escaped(&scenario.about),
        class = if good { "good" } else { "bad" },
        word = if good { "good" } else { "bad" },
    );
    let _ = write!(
        out,
        "<p>{:.1} s, seed {}, killed {} servers and {} agents. Checker: {}</p>",
        outcome.span.as_secs_f64(),
        scenario.seed,
        outcome.kills.0,
        outcome.kills.1,
        escaped(&outcome.verdict.to_string())
    );
    out.push_str("<table><tr>");
    for head in ["group", "step", "count", "errors", "per s", "p50", "p90", "p99", "p99.9", "max ms"] {
        let _ = write!(out, "<th>{head}</th>");
    }
    out.push_str("</tr>");
    for r in rows {
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escaped(&r.group),
            escaped(&r.step),
            r.count,
            r.errors,
            r.per_s,
            ms(r.p50_ms),
            ms(r.p90_ms),
            ms(r.p99_ms),
            ms(r.p999_ms),
            ms(r.max_ms)
        );
    }
    out.push_str("</table>");
    out.push_str(&plot("Median latency over time, ms", "seconds", &x(&p50), &decades(&p50), &p50));
    out.push_str(&plot("99th percentile over time, ms", "seconds", &x(&p99), &decades(&p99), &p99));
    out.push_str(&plot("Latency by percentile, ms", "percentile", &Axis::Nines, &decades(&quantiles), &quantiles));
    out.push_str(&plot("Throughput, steps per second", "seconds", &x(&rate), &y(&rate), &rate));
    if outcome.samples.len() > 1 {
        out.push_str(&plot("Server: CPU", "seconds", &x(&cpu), &y(&cpu), &cpu));
        out.push_str(&plot("Server: memory", "seconds", &x(&memory), &y(&memory), &memory));
        out.push_str(&plot("Server: threads, files, agents", "seconds", &x(&counts), &y(&counts), &counts));
    }
    let _ = write!(out, "<h2>Report</h2><pre>{}</pre></html>", escaped(&report::text(outcome)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_place_their_ticks_in_order_within_the_plot() {
        let lines = [Line { name: "l".to_owned(), points: vec![(0.0, 0.3), (7.0, 42.0)] }];
        for axis in [linear(&lines, |p| p.0), linear(&lines, |p| p.1), decades(&lines), Axis::Nines] {
            let places: Vec<f64> = axis.ticks().iter().map(|(v, _)| axis.place(*v)).collect();
            assert!(places.len() >= 2 && places.windows(2).all(|p| p[0] < p[1]), "{places:?}");
            assert!(places.iter().all(|p| (0.0..=1.0).contains(p)), "{places:?}");
        }
    }

    #[test]
    fn names_from_outside_cannot_be_markup() {
        let lines = [Line { name: "<b>".to_owned(), points: vec![(0.0, 1.0)] }];
        let svg = plot("a & b", "x", &Axis::Nines, &decades(&lines), &lines);
        assert!(svg.contains("&lt;b&gt;") && svg.contains("a &amp; b") && !svg.contains("<b>"));
    }
}
