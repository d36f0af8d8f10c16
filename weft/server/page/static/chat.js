// A conversation with the model, streamed: the OpenAI API as every client uses it.

import { $, because, button, check, el, headers, join, keepKey, keyOf, num, on, tell } from "./parts.js";
import { events } from "./feed.js";
import { nodes } from "./markdown.js";
import { mine } from "./rows.js";
import * as story from "./story.js";

const MAX_PICTURE_MB = 8;

const log = $("log");
const text = $("text");
let model = "";
let takesPictures = false;
let messages = [];
let pictures = []; // to send
let stopper = null; // of the answer being streamed

// Sets the facts about the server: at least the model.
export function introduce({ has_chat: hasChat = true, takes = [], ...facts }) {
	model = facts.model;
	takesPictures = takes.includes("image");
	$("picture-label").hidden = !takesPictures;
	text.disabled = $("send").disabled = !hasChat;
	text.placeholder = hasChat ? "Ask " + model : "This model has no chat";
}

// Returns whether an answer was stopped.
export function stop() {
	stopper?.abort();
	return stopper !== null;
}

function busy(by) {
	stopper = by;
	$("stop").hidden = !by;
	$("send").hidden = by;
}

function clear() {
	stop();
	messages = [];
	log.replaceChildren(el("p", "none", "Ask something: your request is the bold one among those that run."));
}

const follow = () => log.scrollTo(0, log.scrollHeight);

function complain(words) {
	log.append(el("div", "it bad", el("p", "err", words)));
	follow();
}

async function take(files) {
	for (const file of takesPictures ? files : []) {
		if (file.size > MAX_PICTURE_MB * 1e6) complain(`${file.name} is larger than ${MAX_PICTURE_MB} MB`);
		else if (file.type.startsWith("image/")) pictures.push(await urlOf(file));
	}
	showPictures();
}

const urlOf = (file) => new Promise((done) => {
	const reader = new FileReader();
	reader.onload = () => done(reader.result);
	reader.readAsDataURL(file);
});

const showPictures = () => $("shots").replaceChildren(...shots());

const shots = () => pictures.map((src) => Object.assign(el("img"), { src, alt: "picture to send" }));

// ---- one turn

function body() {
	const made = { model: model || undefined, messages: [...messages], stream: true, max_tokens: 256, stream_options: { include_usage: true }, return_cache_cause: true };
	const [system, temperature, most, schema] = ["system", "temperature", "max-tokens", "schema"].map((id) => $(id).value.trim());
	if (system) made.messages.unshift({ role: "system", content: system });
	if (temperature) made.temperature = Number(temperature);
	if (most) made.max_tokens = Number(most);
	if (schema) made.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
	return made;
}

function send() {
	const said = text.value.trim();
	if ((!said && !pictures.length) || stopper) return;
	let content = said;
	if (pictures.length) {
		content = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
		if (said) content.push({ type: "text", text: said });
	}
	messages.push({ role: "user", content });
	let asked;
	try {
		asked = body();
	} catch (error) {
		messages.pop();
		return complain("the JSON schema is not JSON: " + error.message);
	}
	log.querySelector(".none")?.remove();
	const box = el("div", "it busy");
	log.append(el("div", "me", ...shots(), said), box);
	const sent = { said, pictures };
	text.value = "";
	pictures = [];
	showPictures();
	const rid = "page-" + crypto.getRandomValues(new Uint32Array(2)).join("-");
	run(asked, { rid, box, sent, text: "", thought: "", began: performance.now() });
}

async function run(asked, turn) {
	mine.add(turn.rid);
	story.asked.set(turn.rid, asked);
	busy(new AbortController());
	let failed = "";
	try {
		const answer = await check(await fetch("v1/chat/completions", {
			method: "POST", signal: stopper.signal, body: JSON.stringify(asked),
			headers: { "content-type": "application/json", "x-request-id": turn.rid, ...headers("user") },
		}));
		for await (const [, data] of events(answer)) {
			if (data === "[DONE]") break;
			piece(turn, JSON.parse(data));
		}
	} catch (error) {
		failed = error.name === "AbortError" ? "stopped" : error.message;
	}
	busy(null);
	finish(turn, failed);
	text.focus({ preventScroll: true });
}

function piece(turn, { error, usage, choices }) {
	if (error) throw new Error(error.message);
	if (usage) turn.usage = usage;
	turn.end = choices?.[0]?.finish_reason || turn.end;
	const delta = choices?.[0]?.delta || {};
	const thought = delta.reasoning_content || delta.reasoning || "";
	const content = delta.content || "";
	if (content || thought) turn.first ??= performance.now();
	turn.thought += thought;
	turn.text += content;
	turn.frame ??= requestAnimationFrame(() => draw(turn));
}

function draw(turn) {
	turn.frame = null;
	const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
	const made = nodes(turn.text);
	if (turn.thought) {
		const fold = el("details", "", el("summary", "", turn.text || turn.isOver ? "Reasoning" : "Reasoning…"), el("p", "facts", turn.thought));
		fold.open = turn.box.querySelector("details")?.open;
		made.unshift(fold);
	}
	turn.box.replaceChildren(...made);
	if (isAtEnd) follow();
}

function finish(turn, failed) {
	cancelAnimationFrame(turn.frame);
	turn.isOver = true;
	draw(turn);
	const box = turn.box;
	box.classList.remove("busy");
	if (failed && failed !== "stopped") {
		box.classList.add("bad");
		box.append(el("p", "err", failed));
	}
	if (turn.text) messages.push({ role: "assistant", content: turn.text });
	else messages.pop();
	if (failed && !turn.text) giveBack(turn.sent);
	const reason = why(turn);
	if (reason) box.append(el("p", "facts why", reason));
	box.append(el("div", "after", summary(turn, failed), button("Story", () => story.open(turn.rid)), ...story.copies(turn.rid)));
	follow();
}

// Why an answer is not whole, by its finish reason.
const CUT = { length: "cut at the largest number of tokens", content_filter: "cut by a filter", abort: "ended by the server", error: "ended by an error" };

// What was sent in vain can be sent again, unless the user has begun something else.
function giveBack({ said, pictures: sent }) {
	if (text.value || pictures.length) return;
	text.value = said;
	pictures = sent;
	showPictures();
}

function summary({ usage, first, began, end }, failed) {
	const words = [failed === "stopped" && failed, !failed && CUT[end]];
	if (usage) {
		const cached = usage.prompt_tokens_details?.cached_tokens;
		const seconds = (performance.now() - first) / 1000;
		words.push(`${usage.completion_tokens} tokens`, cached && `${cached} of ${usage.prompt_tokens} cached`);
		if (seconds > 0.05) words.push(`${(usage.completion_tokens / seconds).toFixed(0)} tokens/s`);
	}
	if (first) words.push(`first after ${(first - began).toFixed(0)} ms`);
	return join(...words);
}

// Why the first token took its time: the tokens that were computed, and why they were not cached.
function why({ usage, first, began }) {
	const cause = usage?.prompt_tokens_details?.cache_cause;
	const computed = usage?.prompt_tokens - usage?.prompt_tokens_details?.cached_tokens;
	if (!cause || !first || !(computed > 0)) return "";
	const words = `${((first - began) / 1000).toFixed(1)} s: ${num(computed)} prompt tokens computed, because ${because(cause)}`;
	return cause.advice ? `${words}. ${cause.advice[0].toUpperCase()}${cause.advice.slice(1)}.` : words;
}

// ---- actions of the user

on("ask", "submit", (event) => { event.preventDefault(); send(); });
on("text", "keydown", (event) => {
	if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
on("text", "paste", (event) => take(event.clipboardData?.files || []));
on("log", "dragover", (event) => event.preventDefault());
on("log", "drop", (event) => { event.preventDefault(); take(event.dataTransfer.files); });
on("picture", "change", async () => { await take($("picture").files); $("picture").value = ""; });
on("stop", "click", stop);
on("chat-new", "click", clear);
on("user-key", "change", (event) => keepKey("user", event.target));
$("user-key").value = keyOf("user");
clear();
