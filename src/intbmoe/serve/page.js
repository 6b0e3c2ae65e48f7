// Okabe and Ito's colours, which colour-blind people can tell apart, as in the pictures (report/style.py); after eight
// they repeat with stripes, and every block also has its number.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
const DARK = new Set(["#0072b2"]);
const $ = (id) => document.getElementById(id);
const make = (tag, more = {}, ...inside) => {
  const element = Object.assign(document.createElement(tag), more);
  element.append(...inside);
  return element;
};
let model = null, form = null, key = "", shown = null, stopping = null;

function paint(element, block) {
  const colour = COLOURS[block % COLOURS.length], turn = Math.floor(block / COLOURS.length) % 4;
  element.style.color = DARK.has(colour) ? "#fff" : "#000";
  element.style.backgroundColor = colour;
  if (turn) {
    const angle = [0, 45, 135, 90][turn];
    element.style.backgroundImage = `repeating-linear-gradient(${angle}deg, #fff8 0 3px, transparent 3px 8px)`;
  }
}

async function ask(path, body, signal) {
  const headers = key ? { authorization: "Bearer " + key } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined ? undefined : JSON.stringify(body) });
  if (response.ok) return response;
  const problem = new Error(`${response.status}: ` + (await response.json().then((found) => found.error.message,
    () => response.statusText)));
  problem.status = response.status;
  throw problem;
}

// ---- answers ------------------------------------------------------------------------------------------------------
function showResults(answer) {
  const scores = answer.results.map((one) => one.score);
  // Probabilities are drawn as they are; other scores relative to the lowest and the highest of this answer.
  const plain = scores.every((score) => score >= 0 && score <= 1);
  const low = plain ? 0 : Math.min(...scores), high = plain ? 1 : Math.max(...scores);
  const list = make("ol", { className: "results" });
  for (const one of answer.results) {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${100 * (high > low ? (one.score - low) / (high - low) : 1)}%`;
    const name = one.name === undefined || one.name === String(one.id) ? String(one.id) : `${one.name}`;
    list.append(make("li", {}, bar, make("span", {}, name), make("span", {}, one.score.toPrecision(3))));
  }
  $("answer").replaceChildren(answer.results.length ? list : make("p", {}, "Nothing is left to recommend."));
}

function showRouting(answer) {
  shown = answer.tokens && answer.blocks ? answer : null;
  $("routing").hidden = !shown;
  if (!shown) return;
  const layers = shown.blocks.filter((layer) => layer.tokens.some((chosen) => chosen.length));
  $("layers").hidden = !layers.length;
  $("legend").hidden = !layers.length;
  shown.layers = layers;
  if (!layers.length) {
    $("tokens").replaceChildren();
    $("routing-hint").textContent = "This model has no routing: every token goes through the whole model.";
    return;
  }
  $("routing-hint").textContent = "Each token has the colour and the number of the block it went to.";
  const before = $("layer").value;
  $("layer").replaceChildren(...layers.map((layer, at) => make("option", { value: at }, layer.layer)));
  if (before && before < layers.length) $("layer").value = before;
  const most = Math.max(...layers.map((layer) => Math.max(...layer.tokens.map((chosen) => chosen.length))));
  const chosen = $("choice").value;
  $("choice").replaceChildren(...Array.from({ length: most }, (_, rank) => make("option", { value: rank }, `${rank + 1}. of ${most}`)));
  if (chosen && chosen < most) $("choice").value = chosen;
  drawRouting();
}

function visible(text) { return /^[ \t\n]+$/.test(text) ? text.replaceAll(" ", "␣").replaceAll("\t", "⇥").replaceAll("\n", "⏎") : text; }

function drawRouting() {
  const layer = shown.layers[Number($("layer").value)], rank = Number($("choice").value);
  const counts = new Map(), tokens = $("tokens");
  tokens.replaceChildren();
  const patches = form.picture !== undefined;
  // Tokens of an image other than its patches (the class token) come first.
  const side = Math.floor(Math.sqrt(shown.tokens.length)), first = shown.tokens.length - side * side;
  const grid = make("div", { className: "patches" });
  if (patches) {
    grid.style.gridTemplateColumns = `repeat(${side}, 1fr)`;
    grid.append(make("img", { src: form.picture, alt: "Your image, under its patches" }));
  }
  layer.tokens.forEach((chosen, at) => {
    const block = chosen[rank], name = shown.tokens[at] ?? `token ${at + 1}`;
    const said = `${name}: ${chosen.length ? "blocks " + chosen.join(", ") : "no block"}`;
    const patch = patches && at >= first;
    const token = make("span", { className: patch ? "patch" : "token" + (form.spaced ? " text" : ""), title: said });
    if (patch) token.append(block === undefined ? "" : String(block));
    else token.append(form.spaced ? visible(name) : name, make("sub", {}, block === undefined ? "–" : String(block)));
    if (block !== undefined) {
      counts.set(block, (counts.get(block) ?? 0) + 1);
      paint(token, block);
    }
    (patch ? grid : tokens).append(token);
  });
  if (patches) tokens.append(grid);
  const legend = [...counts].sort(([one], [other]) => one - other).map(([block, count]) => {
    const line = make("li", {}, `block ${block}: ${count}`);
    paint(line, block);
    return line;
  });
  $("legend").replaceChildren(...legend);
}

function problem(error) {
  $("answer").replaceChildren(make("p", { className: "problem" }, error.message));
}

// ---- the page -----------------------------------------------------------------------------------------------------
async function start() {
  try {
    model = await (await ask("/v1/model")).json();
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    $("about").textContent = error.status === 401 && !key ? "A key is needed." : error.message;
    return;
  }
  $("key-form").hidden = true;
  $("about").textContent = [model.task, model.method, "version " + model.version].filter(Boolean).join(" · ");
  document.title = `${model.action} · intbmoe`;
  form = forms[model.form ?? "schema"];
  await form.build($("fields"), model.request);
  $("form").hidden = false;
}

$("key-form").addEventListener("submit", (event) => { event.preventDefault(); key = $("key").value.trim(); start(); });
$("example").addEventListener("click", () => form.example(model.request.examples[0]));
$("stop").addEventListener("click", () => stopping?.abort());
$("layer").addEventListener("change", drawRouting);
$("choice").addEventListener("change", drawRouting);
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const started = performance.now();
  $("go").disabled = true;
  $("stop").hidden = !model.streams;
  $("timing").textContent = "";
  stopping = new AbortController();
  try {
    let request = form.request(), answer;
    if (form.run) answer = await form.run(request, stopping.signal);
    else {
      if (model.request.properties.explain) request = { ...request, explain: true };
      answer = await (await ask("/v1/" + model.action, request, stopping.signal)).json();
      form.show(answer);
      $("timing").textContent = `Answered in ${(performance.now() - started).toFixed(0)} ms.`;
    }
    showRouting(answer);
  } catch (error) {
    if (error.name !== "AbortError") problem(error);
  } finally {
    $("go").disabled = false;
    $("stop").hidden = true;
  }
});
start();
