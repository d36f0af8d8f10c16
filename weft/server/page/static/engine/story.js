// The history of a request from GET /requests/{rid}, and how to repeat the request.

import { $, bar, because, copier, el, join, num, on, read, span } from "../parts.js";

const AGAIN_MS = 700;
const STAGES = { queued: "warn", prefill: "prefill", decode: "decode" }; // with their colours
const KINDS = { // by the beginning of an entry
	"c-warn": /^(waits|held|deferred)/,
	"c-bad": /^(retracted|refused)/,
	"c-prefill": /^(admitted|chunk|layers)/,
	"c-decode": /^(first token|finished)/,
};

export const asked = new Map(); // bodies sent by this page, by name
let journals = []; // of engines that record
let shown = "";
let timer = 0;

const path = (rid) => "requests/" + encodeURIComponent(rid);
const fill = (...made) => $("story-body").replaceChildren(...made);

export const introduce = (facts) => { journals = facts.journals || []; };

export async function open(rid) {
	shown = rid;
	$("story").hidden = false;
	fill();
	await load(rid);
	$("story-body").focus({ preventScroll: true });
}

// Returns whether it was open.
export function close() {
	const wasOpen = !$("story").hidden;
	shown = "";
	clearTimeout(timer);
	$("story").hidden = true;
	return wasOpen;
}

on("story-close", "click", close);

async function load(rid) {
	clearTimeout(timer);
	try {
		const { requests } = await read(path(rid), "admin");
		if (rid !== shown) return;
		fill(...requests.map(article));
		if (requests.some((one) => one.state !== "finished")) timer = setTimeout(() => load(rid), AGAIN_MS);
	} catch (error) {
		if (rid === shown) fill(el("p", "none", error.message));
	}
}

function article(one) {
	const stages = {};
	const times = [];
	for (const [word, colour] of Object.entries(STAGES)) {
		const seconds = one.stages[word + "_s"];
		if (!Number.isFinite(seconds)) continue;
		stages[colour] = seconds / Math.max(one.stages.total_s, 1e-6);
		times.push(`${word} ${seconds.toFixed(3)} s`);
	}
	const before = Number.isFinite(one.position) ? `, ${num(one.position)} before it` : "";
	const facts = join(
		one.state + before, `${num(one.prompt_tokens)} prompt tokens, ${num(one.cached_tokens)} cached`,
		`${num(one.output_tokens)} output tokens`, times.join(", "), `${span(one.stages.total_s)} in all`,
	);
	const box = el("article", "", el("p", "rid", one.rid), bar(el("div", "pool"), stages));
	const say = (words, kind = "facts") => box.append(el("p", kind, words));
	say(facts);
	if (one.why) say(one.why, "why");
	if (one.first_token_in_s) {
		const [low, middle, high] = one.first_token_in_s.map(span);
		say(`first token expected in ${middle} (${low} to ${high})`);
	}
	if (one.cache_cause) say(`cache: ${because(one.cache_cause)}`);
	if (one.cache_cause?.advice) say(one.cache_cause.advice);
	if (one.longest_gap) say(`longest gap between tokens ${one.longest_gap.seconds.toFixed(3)} s: ${one.longest_gap.what}`);
	if (one.elsewhere) say(one.elsewhere);
	if (one.drafts) say(`guesses: ${one.drafts}`);
	if (one.times?.length) box.append(el("ul", "times parts", ...one.times.map(part)));
	box.append(el("ol", "times", ...one.timeline.map(entry)), el("div", "after", ...copies(one.rid), ...replay(one)));
	return box;
}

// One part of the time of a request.
const part = ({ part: name, seconds, detail = "" }) => el("li", "", name.replaceAll("_", " "), el("small", "", join(seconds.toFixed(3) + " s", detail)));

function entry({ what, first_step, last_step, times, at_s }) {
	const kind = Object.keys(KINDS).find((one) => KINDS[one].test(what));
	let steps = `step ${num(first_step)}`;
	if (last_step !== first_step) steps += ` to ${num(last_step)}`;
	if (times > 1) steps += `, ${num(times)} times`;
	return el("li", kind, what, el("small", "", `${at_s.toFixed(3)} s · ${steps}`));
}

// ---- copying

// Buttons that copy commands: repeat a request of this page, or get the history of another.
function copies(rid) {
	const body = asked.get(rid);
	const what = body ? ["v1/chat/completions", "WEFT_API_KEY", body] : [path(rid), "WEFT_ADMIN_API_KEY"];
	return [copier("Copy curl", () => curl(...what)), copier("Copy Python", () => python(...what))];
}

// The command that replays the engine's journal up to the last entry.
function replay({ rid, dp_rank: rank = 0, timeline }) {
	const command = `weft replay ${quoted(journals[rank] || "")} --until ${timeline.at(-1)?.last_step} --rid ${quoted(rid)}`;
	return journals[rank] && timeline.length ? [copier("Copy replay", () => command)] : [];
}

const url = (path) => new URL(path, location.href).href;
const quoted = (text) => "'" + text.replaceAll("'", `'\\''`) + "'";

const curl = (path, key, body) => `curl -N ${quoted(url(path))} \\
  -H "authorization: Bearer $${key}"` + (body ? ` \\
  --json ${quoted(JSON.stringify(body))}` : "");

// A JSON string is also a Python string.
const python = (path, key, body) => `import os

import httpx

headers = {"authorization": "Bearer " + os.environ.get("${key}", "none"), "content-type": "application/json"}
body = ${JSON.stringify(body ? JSON.stringify({ ...body, stream: false, stream_options: undefined }) : "")}
answer = httpx.request("${body ? "POST" : "GET"}", ${JSON.stringify(url(path))}, headers=headers, content=body, timeout=None)
print(answer.json())
`;
