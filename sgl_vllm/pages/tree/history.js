/*
 * Totals since the server's start, and charts over time. The page samples the server's counters
 * whenever it refreshes. The server keeps no history, so the curves begin when the page is opened.
 *
 * Counters only grow. What is drawn of one is its growth between two samples, as a level line from
 * the one to the other. After a restart it grows from 0 again; that step is not drawn.
 */

const HISTORY_MS = 10 * 60 * 1000;
const SHORTEST_AXIS_MS = 60 * 1000;
const CLOSEST_SAMPLES_MS = 1000;   // the growth in less time would be noise
const CHART_WIDTH = 600;
const CHART_HEIGHT = 60;

const decimal = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const short = (value) => value < 100 ? decimal.format(value) : number(Math.round(value));
const percent = (share) => `${decimal.format(100 * share)}%`;
const growth = (key, { from, to }) => to[key] - from[key];
const perSecond = (key) => (step) => 1000 * growth(key, step) / (step.to.at - step.from.at);
const atEnd = (key) => ({ to }) => to[key] ?? null;

/** Null without lookups: a rate of nothing is not 0. */
function hitRate(step) {
  const lookedUp = growth("prompt_tokens", step);
  return lookedUp > 0 ? growth("hit_tokens", step) / lookedUp : null;
}

/** `headline` shows one step: from the server's start to the last sample, or all that is drawn. */
const CHARTS = [
  {
    name: "Hit rate", top: 1, show: percent,
    headline: (whole) => hitRate(whole) === null ? "–" : percent(hitRate(whole)),
    lines: [{ kind: "evictable", value: hitRate }],
  },
  {
    name: "Requests", show: (value) => `${short(value)}/s`,
    headline: (whole) => number(growth("requests", whole)),
    lines: [{ kind: "used", value: perSecond("requests") }],
  },
  {
    name: "Evicted tokens", show: (value) => `${short(value)}/s`,
    headline: (whole) => number(growth("evicted", whole)),
    lines: [{ kind: "hot", value: perSecond("evicted") }],
  },
  {
    name: "Programs", show: short,
    lines: [
      { name: "running", kind: "used", value: atEnd("running") },
      { name: "in a tool", kind: "wanted", value: atEnd("in_tool") },
      { name: "waiting for a person", kind: "other", value: atEnd("waiting_for_person") },
    ],
  },
];

class StatsHistory {
  samples = [];

  /** `stats` is an answer of /v1/sgl/stats, or null. Without the tree's counters nothing is kept. */
  add(stats, at = Date.now()) {
    const { radix, programs } = stats ?? {};
    if (radix?.prompt_tokens === undefined) return;
    if (at - (this.samples.at(-1)?.at ?? 0) < CLOSEST_SAMPLES_MS) return;
    this.samples.push({
      at, ...programs, prompt_tokens: radix.prompt_tokens, hit_tokens: radix.hit_tokens,
      requests: radix.lookups, evicted: radix.evicted_tokens + radix.expired_tokens,
    });
    while (this.samples.length > 2 && this.samples[1].at <= at - HISTORY_MS) this.samples.shift();
  }

  /** From each sample to the next, without those in which the server was started again. */
  steps() {
    return this.samples.slice(1).map((to, i) => ({ from: this.samples[i], to }))
      .filter((step) => growth("requests", step) >= 0 && growth("prompt_tokens", step) >= 0);
  }
}

const AT_START = { prompt_tokens: 0, hit_tokens: 0, requests: 0, evicted: 0 };

/** The sums of the steps' growth, as one step. */
function wholeOf(steps) {
  const sum = (key) => steps.reduce((total, step) => total + growth(key, step), 0);
  return { from: AT_START, to: Object.fromEntries(Object.keys(AT_START).map((key) => [key, sum(key)])) };
}

/** One chart of `CHARTS` on the page: a copy of the template #chart. */
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.element = byId("chart").content.firstElementChild.cloneNode(true);
    this.svg = this.element.querySelector("svg");
    this.pointedAt = null;   // share of the width
    this.element.querySelector(".chart-name").textContent = spec.name;
    const first = this.svg.querySelector("path");
    this.paths = spec.lines.map(({ kind }) => {
      const path = first.cloneNode();
      path.classList.add(`line-${kind}`);
      return path;
    });
    first.replaceWith(...this.paths);
    this.svg.addEventListener("pointermove", ({ offsetX }) => this.point(offsetX / this.svg.clientWidth));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  draw(steps, begin, last) {
    const { spec } = this;
    const end = last.at;
    this.shown = { steps, begin, end, last };
    const isKnown = steps.some((step) => spec.lines.some(({ value }) => value(step) !== null));
    this.element.hidden = !isKnown && spec.headline === undefined;
    const peak = Math.max(0, ...steps.flatMap((step) => spec.lines.map(({ value }) => value(step))));
    const top = spec.top ?? (peak || 1);
    spec.lines.forEach(({ value }, i) => {
      this.paths[i].setAttribute("d", pathOf(steps, value, top, begin, end));
    });
    this.element.querySelector(".chart-top").textContent = `up to ${spec.show(spec.top ?? peak)}`;
    this.element.querySelector(".chart-begin").textContent = `${duration((end - begin) / 1000)} ago`;
    this.svg.setAttribute("aria-label", `${spec.name}, highest ${spec.show(peak)}`);
    this.drawHeadline();
  }

  /** Totals, or what there is now or under the pointer. */
  drawHeadline() {
    const { steps, begin, end } = this.shown;
    const at = begin + this.pointedAt * (end - begin);
    const pointed = this.pointedAt === null ? undefined
      : steps.find(({ from, to }) => from.at <= at && at <= to.at);
    const { headline, lines, show } = this.spec;
    const showsTotals = pointed === undefined && headline !== undefined;
    const facts = showsTotals ? this.totals() : lines.map(({ name, kind, value }) => {
        const there = steps.length ? value(pointed ?? steps.at(-1)) : null;
        return fact(name === undefined ? null : `fill-${kind}`, name ?? "", there === null ? "–" : show(there));
      });
    if (pointed !== undefined) facts.push(fact(null, ago((end - pointed.to.at) / 1000)));
    const list = this.element.querySelector(".facts");
    list.classList.toggle("totals", showsTotals);
    list.replaceChildren(...facts);
  }

  /** Since the server's start, and for as long as the page has looked. */
  totals() {
    const { steps, end, last } = this.shown;
    const { headline } = this.spec;
    const facts = [fact(null, "since start", headline({ from: AT_START, to: last }))];
    if (steps.length) {
      const seconds = (end - steps[0].from.at) / 1000;
      facts.push(fact(null, `last ${duration(seconds)}`, headline(wholeOf(steps))));
    }
    return facts;
  }

  point(share) {
    this.pointedAt = share;
    this.drawHeadline();
  }
}

/** A level line for each step, joined where one begins as another ends. */
function pathOf(steps, value, top, begin, end) {
  const x = ({ at }) => (CHART_WIDTH * (at - begin) / (end - begin)).toFixed(1);
  let path = "", endOfLine = null;
  for (const step of steps) {
    const level = value(step);
    if (level === null) continue;
    const y = (CHART_HEIGHT * (1 - Math.min(1, level / top))).toFixed(1);
    path += step.from === endOfLine ? `V${y}H${x(step.to)}` : `M${x(step.from)} ${y}H${x(step.to)}`;
    endOfLine = step.to;
  }
  return path;
}
