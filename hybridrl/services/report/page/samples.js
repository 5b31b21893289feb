"use strict";
// Shows samples: filtered by run and step, searched, sorted, with coloured tokens. Texts of samples
// are inserted as text nodes.
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const Samples = (() => {
  const AT_ONCE = 50;
  const KNOWN = new Set(["sample", "prompt", "response", "reward", "finished", "step", "group", "answer",
    "parts", "versions", "turns", "chars", "logp_mnat", "diff_mnat", "run", "runLabel", "haystack", "images", "pictures",
    "response_images", "response_images_at"]);
  // Bounds of the colours, in nats: bfloat16 runs warn above 0.02, and 0.2 is a usual clip range.
  const DIFFERENCES = [0.002, 0.02, 0.2, 1];
  const SURPRISES = [0.1, 0.7, 2, 5];
  const choice = { run: "", step: "", text: "", order: "step", paint: "difference" };
  let all = [], found = [], numShown = AT_ONCE, list, status, steps, isOpen = new Set();

  const text = (value) => (typeof value === "string" ? value : value == null ? "" : JSON.stringify(value));
  const keyOf = (one) => `${one.run}/${one.step}/${one.sample}`;
  const level = (size, ends) => ends.filter((end) => size >= end).length;
  const isList = (value) => Array.isArray(value) && value.length > 0;

  // Expands pairs of [value, number of tokens] to one value per token.
  function unrolled(pairs, count) {
    const values = [];
    for (const [value, number] of isList(pairs) ? pairs : []) {
      for (let i = 0; i < number && values.length < count; i++) values.push(value);
    }
    return values;
  }

  function tokensOf(sample) {
    const letters = Array.from(text(sample.response)); // by code point, as in Python
    if (!isList(sample.chars)) return null;
    const count = sample.chars.length;
    const versions = unrolled(sample.versions, count), observed = unrolled(sample.turns, count);
    let at = 0;
    return sample.chars.map((size, i) => {
      const end = i === count - 1 ? letters.length : at + size;
      const token = { text: letters.slice(at, end).join(""), logp: sample.logp_mnat?.[i] / 1000, difference: sample.diff_mnat?.[i] / 1000, version: versions[i], isObserved: observed[i] === 1 };
      at = end;
      return token;
    });
  }

  function classOf(token, newest) {
    if (token.isObserved) return "";
    if (choice.paint === "difference" && Number.isFinite(token.difference)) {
      const size = level(Math.abs(token.difference), DIFFERENCES);
      return size ? `${token.difference > 0 ? "more" : "less"}${size}` : "";
    }
    if (choice.paint === "surprise" && Number.isFinite(token.logp)) {
      const size = level(-token.logp, SURPRISES);
      return size ? `rare${size}` : "";
    }
    if (choice.paint === "version" && token.version != null) return `age${Math.min(4, newest - token.version)}`;
    return "";
  }

  function about(token) {
    const parts = [];
    if (token.isObserved) parts.push("from the environment");
    else {
      if (Number.isFinite(token.logp)) parts.push(`engine ${token.logp.toFixed(3)} nats`);
      if (Number.isFinite(token.difference)) parts.push(`trainer − engine ${token.difference.toFixed(3)}`);
    }
    if (token.version != null) parts.push(`version ${token.version}`);
    return parts.join(", ");
  }

  // Returns the elements that show images, which are pairs of a name and a text about the image.
  function picturesOf(sample, images) {
    if (!images.length) return [];
    const shown = images.map(([name, alt]) => (sample.pictures[name]
      ? el("img", { class: "picture", src: sample.pictures[name], alt })
      : el("span", { class: "note" }, `${alt} is in rollouts/images`)));
    return [el("div", { class: "pictures" }, ...shown)];
  }

  const imagesOfPrompt = (sample) => (isList(sample.images) ? sample.images.map((name, i) => [name, `image ${i + 1} of the prompt`]) : []);

  // Returns the images of the response tokens from `start` up to `end`.
  function imagesBetween(sample, start, end) {
    const names = isList(sample.response_images) ? sample.response_images : [];
    const found = names.map((name, i) => [name, `image ${i + 1} of the response`]);
    return found.filter((_, i) => { const at = sample.response_images_at?.[i] ?? 0; return at >= start && at < end; });
  }

  function responseOf(sample) {
    const tokens = tokensOf(sample);
    if (!tokens) return [...picturesOf(sample, imagesBetween(sample, 0, Infinity)), el("pre", { class: "turn" }, text(sample.response))];
    const newest = Math.max(...tokens.map((token) => token.version ?? 0));
    const turns = [];
    tokens.forEach((token, start) => {
      if (!turns.length || turns[turns.length - 1].isObserved !== token.isObserved) turns.push({ isObserved: token.isObserved, start, tokens: [] });
      turns[turns.length - 1].tokens.push(token);
    });
    return turns.map((turn, number) => {
      const name = turn.isObserved ? "environment" : turns.length > 1 ? `policy, turn ${Math.floor(number / 2) + 1}` : "";
      const spans = turn.tokens.map((token) => el("span", { class: classOf(token, newest), title: about(token) }, token.text));
      const box = el("pre", { class: turn.isObserved ? "turn observed" : "turn" }, ...spans);
      const shown = picturesOf(sample, imagesBetween(sample, turn.start, turn.start + turn.tokens.length));
      return name ? el("div", {}, el("div", { class: "who" }, name), ...shown, box) : box;
    });
  }

  function facts(sample) {
    const rows = [["reward", text(sample.reward)]];
    for (const [name, value] of Object.entries(sample.parts ?? {})) rows.push([`reward of ${name}`, text(value)]);
    if ("answer" in sample) rows.push(["answer", text(sample.answer)]);
    if ("finished" in sample) rows.push(["ended by itself", sample.finished ? "yes" : "no, cut off"]);
    if (isList(sample.chars)) rows.push(["tokens", String(sample.chars.length)]);
    if (isList(sample.versions)) rows.push(["weights of step", sample.versions.map(([v, n]) => (sample.versions.length > 1 ? `${v} (${n} tokens)` : v)).join(", ")]);
    if (isList(sample.diff_mnat)) {
      const sizes = sample.diff_mnat.filter((d) => d != null).map(Math.abs);
      if (sizes.length) rows.push(["|trainer − engine|, nats", `mean ${(sizes.reduce((a, b) => a + b, 0) / sizes.length / 1000).toFixed(4)}, largest ${(Math.max(...sizes) / 1000).toFixed(3)}`]);
    }
    for (const [name, value] of Object.entries(sample)) if (!KNOWN.has(name)) rows.push([name, text(value)]);
    return el("table", { class: "facts" }, el("tbody", {}, ...rows.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, String(value))))));
  }

  function body(sample) {
    return el("div", { class: "sample-body" },
      el("div", {}, el("div", { class: "who" }, "prompt"), ...picturesOf(sample, imagesOfPrompt(sample)), el("pre", { class: "turn prompt" }, text(sample.prompt)),
        el("div", { class: "who" }, "response"), ...responseOf(sample)),
      facts(sample));
  }

  function row(sample) {
    const key = keyOf(sample);
    const reward = typeof sample.reward === "number" ? Figures.number(sample.reward) : text(sample.reward);
    const where = [sample.runLabel, `step ${sample.step}`, sample.sample == null ? "" : `#${sample.sample}`].filter(Boolean).join(" · ");
    const brief = (long) => { const short = text(long).slice(0, 160).replace(/\s+/g, " "); return short; };
    const head = el("summary", {},
      el("span", { class: "where" }, where),
      el("span", { class: "reward" }, reward, sample.finished === false ? " ✂" : ""),
      el("span", { class: "brief" }, brief(sample.prompt), el("b", {}, " → "), brief(sample.response)));
    const node = el("details", { class: "sample" }, head);
    const fill = () => { if (node.open && node.childNodes.length === 1) node.append(body(sample)); };
    node.addEventListener("toggle", () => {
      if (node.open) isOpen.add(key); else isOpen.delete(key);
      fill();
    });
    if (isOpen.has(key)) { node.open = true; fill(); }
    return node;
  }

  const largest = (sample) => Math.max(0, ...(sample.diff_mnat ?? []).map((d) => Math.abs(d ?? 0)));
  const ORDERS = {
    step: null,
    "reward, lowest first": (a, b) => (a.reward ?? 0) - (b.reward ?? 0),
    "reward, highest first": (a, b) => (b.reward ?? 0) - (a.reward ?? 0),
    "longest response": (a, b) => text(b.response).length - text(a.response).length,
    "largest difference": (a, b) => largest(b) - largest(a),
  };

  function haystack(one) {
    one.haystack ??= [one.prompt, one.response, one.answer].map(text).join("\n").toLowerCase();
    return one.haystack;
  }

  function choose() {
    const wanted = choice.text.toLowerCase();
    found = all.filter((one) => (!choice.run || one.runLabel === choice.run) && (!choice.step || String(one.step) === choice.step) && (!wanted || haystack(one).includes(wanted)));
    if (ORDERS[choice.order]) found = [...found].sort(ORDERS[choice.order]);
    show();
  }

  function show() {
    list.replaceChildren(...found.slice(0, numShown).map(row));
    if (found.length > numShown) list.append(el("button", { type: "button", class: "more", onclick: () => { numShown += AT_ONCE; show(); } }, `${found.length - numShown} more`));
    status.textContent = `${found.length.toLocaleString("en-US")} of ${all.length.toLocaleString("en-US")} samples`;
  }

  function select(label, values, name) {
    const node = el("select", { onchange: (event) => { choice[name] = event.target.value; numShown = AT_ONCE; choose(); } },
      ...values.map(([value, shown]) => el("option", { value, selected: value === choice[name] }, shown)));
    return el("label", {}, label, " ", node);
  }

  const KEYS = {
    difference: [["less4", "−1"], ["less3", "−0.2"], ["less2", "−0.02"], ["", "0"], ["more2", "0.02"], ["more3", "0.2"], ["more4", "1 nats: trainer − engine"]],
    surprise: [["", "likely"], ["rare1", "0.1"], ["rare2", "0.7"], ["rare3", "2"], ["rare4", "5 nats: −log p of the engine"]],
    version: [["age0", "newest"], ["age1", "1 older"], ["age2", "2"], ["age3", "3"], ["age4", "4 or more steps"]],
    none: [],
  };
  const keys = () => KEYS[choice.paint].map(([name, label]) => el("span", { class: `key ${name}` }, label));

  function wordSearch(event) {
    choice.text = event.target.value;
    numShown = AT_ONCE;
    choose();
  }

  return {
    // Returns the elements that show the samples of all runs.
    make(runs) {
      all = runs.flatMap((run, number) => run.samples.map((one) => ({ ...one, pictures: run.images ?? {}, run: number, runLabel: runs.length > 1 ? run.label : "" })));
      steps = [...new Set(all.map((one) => one.step))].sort((a, b) => a - b);
      if (!steps.map(String).includes(choice.step)) choice.step = "";
      list = el("div", { class: "samples" });
      status = el("span", { class: "status" });
      const key = el("div", { class: "keys" }, ...keys());
      const paint = el("label", {}, "colour ", el("select", { onchange: (event) => { choice.paint = event.target.value; key.replaceChildren(...keys()); show(); } },
        ...["difference", "surprise", "version", "none"].map((name) => el("option", { value: name, selected: name === choice.paint }, name))));
      const dumps = runs.reduce((sum, run) => sum + run.dumps, 0);
      const note = dumps > steps.length || all.length >= 2000 ? el("p", { class: "note" }, "The page shows at most 2,000 samples per run, evenly spread over its dumps; rollouts/ in the run folder contains all dumped samples.") : "";
      const tools = el("div", { class: "tools" },
        el("input", { type: "search", placeholder: "search texts and answers", value: choice.text, oninput: wordSearch, "aria-label": "search samples" }),
        select("step", [["", "all"], ...steps.map((step) => [String(step), String(step)])], "step"),
        ...(runs.length > 1 ? [select("run", [["", "all"], ...runs.map((run) => [run.label, run.label])], "run")] : []),
        select("order", Object.keys(ORDERS).map((name) => [name, name]), "order"), paint, status);
      choose();
      return [note, tools, key, list].filter(Boolean);
    },
    count: () => found.length,
  };
})();
