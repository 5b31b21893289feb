"use strict";
// Builds the page: header, tools, figures, evaluations, timelines of steps, samples, configuration.
const Page = (() => {
  const EVERY_MS = 3000;
  let data = JSON.parse(document.getElementById("data").textContent);
  let tag = data.tag, live; // state of the run folders that a served page shows

  const table = (rows, head) => el("div", { class: "scroll" }, el("table", {},
    ...(head ? [el("thead", {}, el("tr", {}, ...head.map((cell) => el("th", {}, cell))))] : []),
    el("tbody", {}, ...rows.map(([name, ...cells]) => el("tr", {}, el("th", {}, name), ...cells.map((cell) => el("td", {}, cell)))))));

  const section = (id, title, ...children) => el("section", { id }, el("h2", {}, title), ...children);
  const labels = () => data.runs.map((run) => run.label);

  function tools() {
    const { view } = Figures;
    const output = el("output", {}, view.smoothing.toFixed(2));
    const smoothing = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smoothing, "aria-label": "smoothing",
      oninput: (event) => { output.textContent = Number(event.target.value).toFixed(2); Figures.change({ smoothing: Number(event.target.value) }); } });
    const hours = data.runs.every((run) => run.metrics["time_s/step"]);
    const across = el("select", { "aria-label": "horizontal axis", onchange: (event) => Figures.change({ x: event.target.value }) },
      el("option", { value: "step", selected: view.x === "step" }, "steps"), ...(hours ? [el("option", { value: "hours", selected: view.x === "hours" }, "hours of steps")] : []));
    const log = el("input", { type: "checkbox", checked: view.isLog, onchange: (event) => Figures.change({ isLog: event.target.checked }) });
    const runs = labels().length < 2 ? [] : labels().map((label, number) => {
      const box = el("input", { type: "checkbox", checked: !view.hidden.has(label), onchange: (event) => {
        const hidden = new Set(view.hidden);
        if (event.target.checked) hidden.delete(label); else hidden.add(label);
        Figures.change({ hidden });
      } });
      const mark = el("i", { class: "mark" });
      mark.style.background = Figures.color(number);
      return el("label", { class: "run" }, box, mark, label);
    });
    const filter = el("input", { type: "search", placeholder: "find a figure or metric", "aria-label": "find a figure", oninput: (event) => onlyWith(event.target.value.toLowerCase()) });
    return el("div", { class: "tools", id: "tools" },
      el("label", {}, "smoothing ", smoothing, output), el("label", {}, across), el("label", {}, log, "log scale"),
      filter, ...runs, el("button", { type: "button", class: "reset", onclick: () => Figures.reset() }, "whole run"));
  }

  function onlyWith(words) {
    for (const figure of document.querySelectorAll("figure")) figure.classList.toggle("away", !figure.dataset.title.includes(words));
    for (const group of document.querySelectorAll(".group")) {
      group.classList.toggle("away", !group.querySelector("figure:not(.away)"));
      if (words && group.tagName === "DETAILS" && !group.classList.contains("away")) group.open = true;
    }
  }

  function groups() {
    return data.groups.flatMap((group) => {
      const figures = group.plots.flatMap((plot) => Figures.make(plot));
      if (!figures.length) return [];
      const plots = el("div", { class: "plots" }, ...figures);
      if (group.title !== "All other metrics") return [el("div", { class: "group" }, el("h3", { class: "title" }, group.title), plots)];
      return [el("details", { class: "group" }, el("summary", {}, `${group.title} (${figures.length})`), plots)];
    });
  }

  // Shows the phases of all ranks on one time axis, with one row per rank.
  function lanes(timeline) {
    const ranks = Object.entries(timeline.ranks ?? {}).sort((a, b) => a[0] - b[0]);
    const spans = ranks.flatMap(([, of]) => of);
    if (!spans.length) return [];
    const first = Math.min(...spans.map(([, began]) => began)), last = Math.max(...spans.map(([, , ended]) => ended));
    const names = [...new Set(spans.map(([name]) => name))];
    const percent = (seconds) => `${(100 * (seconds - first)) / (last - first || 1)}%`;
    const rows = ranks.map(([rank, of]) => {
      const lane = el("div", { class: "lane" });
      for (const [name, began, ended] of of) {
        const block = el("div", { class: "span", title: `rank ${rank}, ${name}: ${(ended - began).toFixed(4)} s, from ${(began - first).toFixed(4)} s on` }, el("b", {}, name));
        block.style.left = percent(began);
        block.style.width = `calc(${percent(ended)} - ${percent(began)})`;
        block.style.background = Figures.color(names.indexOf(name));
        lane.append(block);
      }
      return [el("div", { class: "rank" }, `rank ${rank}`), lane];
    });
    const longest = names.map((name) => {
      const sums = ranks.map(([rank, of]) => [of.filter((one) => one[0] === name).reduce((sum, [, began, ended]) => sum + ended - began, 0), rank]);
      const [most, rank] = sums.reduce((a, b) => (b[0] > a[0] ? b : a)), [least] = sums.reduce((a, b) => (b[0] < a[0] ? b : a));
      const mark = el("i", { class: "mark" });
      mark.style.background = Figures.color(names.indexOf(name));
      return [el("span", {}, mark, ` ${name}`), least.toFixed(3), most.toFixed(3), `rank ${rank}`];
    });
    const grid = el("div", { class: "lanes" }, ...rows.flat());
    const zoom = el("select", { "aria-label": "zoom of the lanes", onchange: (event) => { grid.style.width = `${event.target.value}00%`; } },
      ...[1, 2, 4, 8, 16].map((times) => el("option", { value: times }, `${times} ×`)));
    return [
      el("p", { class: "note" }, `Step ${timeline.step}, ${(last - first).toFixed(3)} s. Perfetto can open the trace, traces/step_${timeline.step}.json.gz in the run folder. `, el("label", {}, "zoom ", zoom)),
      el("div", { class: "scroll" }, grid), table(longest, ["phase", "fastest rank, s", "slowest rank, s", "slowest"])];
  }

  function timelines() {
    return data.runs.flatMap((run) => run.timelines.map((timeline) => [run, timeline])).map(([run, timeline], number) => {
      const of = data.runs.length > 1 ? `, ${run.label}` : "";
      return el("details", { class: "timeline", open: number === 0 }, el("summary", {}, `Step ${timeline.step}${of}`), ...lanes(timeline));
    });
  }

  function parts() {
    const many = data.runs.length > 1;
    Figures.begin(data.runs);
    const found = [el("header", { class: "top" }, el("h1", {}, data.title), ...(live ? [live] : [])),
      el("div", { class: "summary" }, ...data.summary.map((rows) => table(rows.map(([name, values]) => [name, ...values]), many ? ["", ...labels()] : null)))];
    if (data.differences) found.push(section("differences", "Differences of configuration", data.differences.length ? table(data.differences.map(([key, values]) => [key, ...values]), ["key", ...labels()]) : el("p", {}, "None.")));
    found.push(section("curves", "Curves", el("p", { class: "note" }, "Drag across a figure to zoom in all figures; double-click to show the whole run. Click on a name to hide its line."), tools(), ...groups()));
    if (data.evaluations.length) found.push(section("evaluations", "Evaluations", el("p", { class: "note" }, "± is the standard error over prompts."), ...data.evaluations.flatMap((one) => [...(many ? [el("h3", {}, one.label)] : []), table(one.rows, one.columns)])));
    const steps = timelines();
    if (steps.length) found.push(section("timeline", "One step, rank by rank", ...steps));
    if (data.runs.some((run) => run.samples.length)) found.push(section("samples", "Samples", ...Samples.make(data.runs)));
    for (const run of data.runs) if (run.config) found.push(el("section", { class: "config" }, el("details", {}, el("summary", {}, `Configuration${many ? `, ${run.label}` : ""}`), el("pre", {}, run.config))));
    const links = [...found].filter((node) => node.id).map((node) => el("a", { href: `#${node.id}` }, node.querySelector("h2").textContent));
    found[0].append(el("nav", {}, ...links));
    return found;
  }

  function show() {
    const open = [...document.querySelectorAll("details.group")].map((node) => node.open);
    const { scrollX, scrollY } = window;
    main.replaceChildren(...parts());
    document.querySelectorAll("details.group").forEach((node, i) => { node.open = open[i] ?? node.open; });
    window.scrollTo(scrollX, scrollY);
  }

  async function follow() {
    try {
      const answer = await fetch("data.json", { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        data = await answer.json();
        tag = answer.headers.get("ETag");
        show();
      }
      live.textContent = answer.ok || answer.status === 304 ? "live" : `live: ${answer.status}`;
      live.classList.toggle("lost", !(answer.ok || answer.status === 304));
    } catch {
      live.textContent = "the server has stopped";
      live.classList.add("lost");
    }
    setTimeout(follow, EVERY_MS);
  }

  const main = el("main");
  document.body.append(main);
  if (tag) live = el("span", { class: "live" }, "live");
  show();
  if (tag) setTimeout(follow, EVERY_MS);
  performance.mark("page-ready");
  return { data: () => data };
})();
