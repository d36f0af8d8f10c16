// Puts the page together: pictures of the live engine or of a recording come in, and each part
// draws what is its own.

import { $, forgetColours, headers, keepKey, num, span } from "./parts.js";
import { Chat } from "./chat.js";
import { Engines } from "./engines.js";
import { Feed } from "./feed.js";
import { Figures } from "./figures.js";
import { Film } from "./film.js";
import { Memory } from "./memory.js";
import { Rows } from "./rows.js";
import { Steps } from "./steps.js";
import { Story, liveStory } from "./story.js";
import { Tree } from "./tree.js";

const WORDS_MS = 5000; // between two sentences for screen readers
const root = document.documentElement;
const isFilm = root.dataset.mode === "film";

const film = isFilm ? new Film(show) : null;
const steps = new Steps(film ? (number) => film.seek(number) : null);
const figures = new Figures();
const engines = new Engines(() => {
	steps.clear();
	figures.clear();
	draw(latest.get(engines.rank));
});
const memory = new Memory();
const tree = new Tree();
const story = new Story(film ? (rid) => film.story(rid) : liveStory);
const rows = new Rows((rid) => story.open(rid));
const chat = film ? null : new Chat({ open: (rid) => story.open(rid), mine: (rid) => rows.mine.add(rid), story });

let hello = null;
let offset = 0; // of the server's clock, in seconds
let isPaused = false;
let saidAt = 0;
const latest = new Map(); // pictures by the rank of the engine, each with its last tree

// ---- pictures

function show(picture) {
	if (isPaused) return;
	latest.set(picture.rank, { ...latest.get(picture.rank), ...picture });
	if (engines.show(picture)) draw(picture);
}

function draw(picture) {
	if (isFilm) steps.clear();
	steps.add(picture.steps);
	if (isFilm) steps.finish();
	figures.show(picture.at_s, picture.stats);
	rows.show(picture);
	memory.show(picture.stats, picture.pins);
	if (picture.tree) tree.show(picture.tree);
	if (!isFilm) live();
	speak(picture.stats);
}

function speak(stats) {
	const now = performance.now();
	if (now - saidAt < WORDS_MS) return;
	saidAt = now;
	const words = figures.words(stats);
	if ($("words").textContent !== words) $("words").textContent = words;
}

// ---- how the stream is

function state(kind, words) {
	$("dot").className = "dot " + kind;
	if ($("state").textContent !== words) $("state").textContent = words;
}

function live() {
	if (isPaused || !hello) return;
	state("live", `up ${span(Date.now() / 1000 + offset - hello.started_at)}`);
	$("gate").hidden = true;
}

const feed = film ? null : new Feed({
	hello(facts) {
		hello = facts;
		offset = facts.now - Date.now() / 1000;
		introduce(facts);
		chat.facts(facts);
		steps.clear();
		latest.clear();
		engines.clear();
	},
	picture: show,
	away({ why }) { state("away", why); },
	state,
	refused(why) {
		state("wait", "engine not shown");
		$("gate").hidden = false;
		$("gate-why").textContent = `${why}. The chat works with a user's key, too.`;
		introduceChat();
	},
});

function introduce(facts) {
	$("model").textContent = facts.model;
	const words = [facts.summary, facts.context && `context ${num(facts.context)}`, facts.policy && `policy ${facts.policy}`, facts.version && `weft ${facts.version}`];
	$("summary").textContent = words.filter(Boolean).join(" · ");
	document.title = `${facts.model} · weft`;
}

// Without the engine's word, the name of the model comes from the API that everybody uses.
async function introduceChat() {
	try {
		const answer = await fetch("v1/models", { headers: headers("user") });
		if (!answer.ok) return;
		const model = (await answer.json()).data[0].id;
		$("model").textContent = model;
		chat.model = model;
	} catch { /* the chat says what is wrong when it is used */ }
}

// ---- what the user does

$("gate-form").addEventListener("submit", (event) => {
	event.preventDefault();
	keepKey("admin", $("admin-key").value.trim());
	$("gate").hidden = true;
	state("wait", "connecting");
	feed.open();
});

function pause() {
	isPaused = !isPaused;
	$("pause").setAttribute("aria-pressed", String(isPaused));
	$("pause").textContent = isPaused ? "Go on" : "Pause";
	if (isPaused) state("wait", "picture stopped");
}

$("pause").addEventListener("click", pause);

$("theme").addEventListener("click", () => {
	const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
	root.dataset.theme = isDark ? "light" : "dark";
	localStorage.setItem("weft-theme", root.dataset.theme);
	forgetColours();
	steps.draw();
});

for (const name of ["engine", "chat"]) {
	$("tab-" + name).addEventListener("click", () => {
		$("main").dataset.tab = name;
		for (const other of ["engine", "chat"]) $("tab-" + other).setAttribute("aria-pressed", String(other === name));
	});
}

document.addEventListener("keydown", (event) => {
	const isTyping = /^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName || "");
	if (event.key === "Escape") {
		if (chat?.stopper) chat.stop();
		else story.close();
	}
	if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
	if (event.key === "p") pause();
	if (event.key === "/" && chat) { event.preventDefault(); $("tab-chat").click(); $("text").focus(); }
});

// ---- begin

const theme = localStorage.getItem("weft-theme");
if (theme) root.dataset.theme = theme;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColours(); steps.draw(); });
if (film) begin();
else feed.open();

async function begin() {
	document.body.classList.add("is-film");
	document.querySelector(".tabs").hidden = true;
	$("pause").hidden = true;
	try {
		const facts = await film.open();
		introduce(facts);
		state("live", film.words());
		await film.go(0);
	} catch (error) {
		state("away", error.message);
	}
}
